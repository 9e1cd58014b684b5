"""Checkpoint and log always match after any interruption, and other folders are not modified."""

import pytest
import torch

from vllm_medusa.files import FileRefused, aside, read_json
from vllm_medusa.training.run import Stage, TrainingRun


def begun(output, settings, **options) -> tuple[TrainingRun, Stage]:
    run = TrainingRun(output, settings, **options)
    run.work.mkdir(exist_ok=True)
    return run, Stage(run)


def steps(stage: Stage) -> list[int]:
    return [entry["step"] for entry in stage.entries()]


def test_log_and_checkpoint_have_the_same_step(tmp_path):
    output = tmp_path / "heads"
    run, stage = begun(output, {"a": 1})
    assert stage.load() is None
    for step in range(5):
        stage.log({"step": step})
        if step == 2:
            stage.save({"step": 3, "weight": torch.arange(3.0)})
    run.close()
    with (output / "training/log.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')  # truncated by a kill
    aside(output / "training" / "work" / "state.pt").write_bytes(b"truncated as well")
    run, stage = begun(output, {"a": 1})
    state = stage.load()
    assert state is not None and state["step"] == 3
    assert torch.equal(state["weight"], torch.arange(3.0))
    assert steps(stage) == [0, 1, 2]
    stage.log({"step": 3})
    assert steps(stage) == [0, 1, 2, 3]
    run.close()
    run, stage = begun(output, {"a": 1})  # no newer checkpoint
    stage.load()
    assert steps(stage) == [0, 1, 2]
    run.close()


def test_other_settings_are_refused_once_training_started(tmp_path):
    output = tmp_path / "heads"
    with pytest.raises(OSError, match="no target"), TrainingRun(output, {"x": 0}):
        raise OSError("no target")
    begun(output, {"recipe": {"epochs": 3, "seed": 0}})[0].close()
    with pytest.raises(FileRefused, match=r"recipe\.epochs was 3 and is now 4.*--overwrite"):
        TrainingRun(output, {"recipe": {"epochs": 4, "seed": 0}})


def test_overwrite_removes_heads_checkpoint_and_caches(tmp_path):
    output = tmp_path / "heads"
    run, stage = begun(output, {"a": 1})
    stage.load()
    stage.save({"step": 1})
    (run.work / "hidden-x").mkdir()
    (run.folder / "last_good").mkdir()
    (output / "config.json").write_text("{}")
    (output / "mine.txt").write_text("kept")
    run.close()
    run, stage = begun(output, {"a": 2}, overwrite=True)
    assert not run.complete and stage.load() is None
    assert sorted(p.name for p in output.iterdir()) == ["mine.txt", "training"]
    assert list(run.work.iterdir()) == [] and not (run.folder / "last_good").exists()
    run.close()


def test_a_killed_overwrite_does_not_resume_the_old_checkpoint(tmp_path):
    output = tmp_path / "heads"
    run, stage = begun(output, {"a": 1})
    stage.load()
    stage.log({"step": 1})
    stage.save({"step": 1})
    run.close()
    (run.folder / "log.jsonl").unlink()  # the first of several files that --overwrite removes
    run, stage = begun(output, {"a": 1})
    assert stage.load() is None
    run.close()


def test_a_complete_run_has_nothing_to_do(tmp_path):
    output = tmp_path / "heads"
    for complete in (False, True, True):
        with TrainingRun(output, {}) as run:
            assert run.complete == complete
            run.work.mkdir(exist_ok=True)  # as if killed before it was removed
            (output / "config.json").write_text("{}")
        assert [path.name for path in run.folder.iterdir()] == ["run.json"]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    project = tmp_path / "project"
    (project / "training").mkdir(parents=True)
    (project / "training" / "notes.txt").touch()
    for name, reason in (
        ("full", "not a training run"),
        ("file", "is a file"),
        ("missing/heads", "no folder"),
        ("project", "not a training run"),
    ):
        with pytest.raises(FileRefused, match=reason):
            TrainingRun(tmp_path / name, {}, overwrite=True)
    assert (tmp_path / "full/thesis.tex").exists() and not (tmp_path / "full/training").exists()
    (project / "training" / "notes.txt").unlink()
    (project / "training" / ".run.json.part").touch()  # killed before run.json existed
    begun(project, {"lr": 1})[0].close()
    assert read_json(project / "training" / "run.json")["settings"] == {"lr": 1}
