"""State and log tell of the same steps after any cut, and foreign folders are left alone."""

from pickle import PicklingError

import pytest
import torch

from vllm_medusa.files import FileRefused, aside, read_json
from vllm_medusa.training.state import TrainingRun


def steps(run: TrainingRun) -> list[int]:
    return [entry["step"] for entry in run.entries()]


def test_log_and_state_are_of_the_same_step(tmp_path):
    output = tmp_path / "heads"
    with TrainingRun(output, {"a": 1}) as run:
        assert run.load() is None
        for step in range(5):
            run.log({"step": step})
            if step == 2:
                run.save({"step": 3, "weight": torch.arange(3.0)})
    with (output / "training/log.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "lo')  # torn by a kill
    aside(output / "training" / "work" / "state.pt").write_bytes(b"torn as well")
    with TrainingRun(output, {"a": 1}) as run:
        state = run.load()
        assert state is not None and state["step"] == 3
        assert torch.equal(state["weight"], torch.arange(3.0))
        assert steps(run) == [0, 1, 2]
        run.log({"step": 3})
        assert steps(run) == [0, 1, 2, 3]
    with TrainingRun(output, {"a": 1}) as run:  # no state since
        run.load()
        assert steps(run) == [0, 1, 2]


def test_a_state_that_can_not_be_written_leaves_the_one_before(tmp_path):
    with TrainingRun(tmp_path / "heads", {}) as run:
        run.load()
        run.save({"step": 1})
        with pytest.raises((AttributeError, PicklingError)):
            run.save({"step": 2, "weight": torch.zeros(9), "rate": lambda: 0})
    with TrainingRun(tmp_path / "heads", {}) as run:
        assert run.load() == {"step": 1}


def test_another_run_is_refused_and_says_what_changed(tmp_path):
    output = tmp_path / "heads"
    for same in ((1, 2), [1, 2]):
        with TrainingRun(output, {"recipe": {"epochs": 3, "seed": 0}, "x": same}) as run:
            run.load()
            run.save({"step": 1})
    with pytest.raises(FileRefused, match=r"recipe\.epochs was 3 and is now 4.*--overwrite"):
        TrainingRun(output, {"recipe": {"epochs": 4, "seed": 0}, "x": [1, 2]})


def test_overwrite_throws_away_heads_state_and_caches(tmp_path):
    output = tmp_path / "heads"
    with TrainingRun(output, {"a": 1}) as run:
        run.load()
        run.save({"step": 1})
        (run.work / "hidden-x").mkdir()
        (run.folder / "last_good").mkdir()
        (output / "config.json").write_text("{}")
        (output / "mine.txt").write_text("kept")
    with TrainingRun(output, {"a": 2}, overwrite=True) as run:
        assert not run.complete and run.load() is None
        assert sorted(p.name for p in output.iterdir()) == ["mine.txt", "training"]
        assert [p.name for p in run.work.iterdir()] == ["lock"]
        assert not (run.folder / "last_good").exists()


def test_overwriting_that_is_killed_continues_no_old_state(tmp_path, monkeypatch):
    output = tmp_path / "heads"
    with TrainingRun(output, {"a": 1}) as run:
        run.load()
        run.save({"step": 1})
        (run.work / "hidden-x").mkdir()
        with TrainingRun(run.work / "warm-up", {}) as earlier:
            earlier.load()
            earlier.save({"step": 1})

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            TrainingRun(output, {"a": 2}, overwrite=True)
    assert not list(output.rglob("state.pt"))
    with pytest.raises(FileRefused, match=r"a was 1 and is now 2"):
        TrainingRun(output, {"a": 2})
    with TrainingRun(output, {"a": 1}) as run:
        assert run.load() is None
    with TrainingRun(output, {"a": 2}, overwrite=True) as run:
        assert run.load() is None
    with TrainingRun(output, {"a": 2}):
        pass


def test_a_complete_run_has_nothing_to_do(tmp_path):
    output = tmp_path / "heads"
    with TrainingRun(output, {}) as run:
        run.load()
        run.save({"step": 1})
        assert not run.complete
        (output / "config.json").write_text("{}")
        run.finish()
    assert not (output / "training/work").exists()
    with TrainingRun(output, {}) as run:
        assert run.complete
    assert not (output / "training/work").exists()


def test_one_process_at_a_time(tmp_path):
    with (
        TrainingRun(tmp_path / "heads", {}),
        pytest.raises(FileRefused, match="another process is training"),
    ):
        TrainingRun(tmp_path / "heads", {})


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, reason in (
        ("full", "not a training run"),
        ("file", "is a file"),
        ("missing/heads", "no folder"),
    ):
        with pytest.raises(FileRefused, match=reason):
            TrainingRun(tmp_path / name, {}, overwrite=True)
    assert (tmp_path / "full/thesis.tex").exists() and not (tmp_path / "full/training").exists()


def test_a_folder_named_training_makes_no_run(tmp_path):
    project = tmp_path / "project"
    (project / "training" / "work").mkdir(parents=True)
    for name in ("config.json", "training/notes.txt", "training/work/data.bin"):
        (project / name).write_text("{}")
        with pytest.raises(FileRefused, match="not a training run"):
            TrainingRun(project, {}, overwrite=True)
        (project / name).unlink()
    (project / "training" / "work" / "lock").touch()  # killed before run.json was there
    (project / "training" / ".run.json.part").touch()
    (project / "training" / "run.json.part").touch()  # by an older version
    for settings in ({}, {"lr": 1}):  # the second after a run that ended before its first step
        with TrainingRun(project, settings) as run:
            assert not run.complete
    assert read_json(project / "training" / "run.json") == {"lr": 1}


def test_other_processes_do_not_judge_what_the_main_one_is_making(tmp_path):
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "new").touch()
    with TrainingRun(tmp_path / "heads", {}, main=False) as run:
        assert not run.complete
