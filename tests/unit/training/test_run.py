"""Runs: checkpoint and log match after any interruption, defaults, and devices."""

import math
from datetime import timedelta
from types import SimpleNamespace

import accelerate
import pytest
import torch

from vllm_medusa.files import FileRefused, aside, read_json
from vllm_medusa.training import recipe
from vllm_medusa.training.options import JointOptions, StepOptions
from vllm_medusa.training.run import Stage, TrainingRun
from vllm_medusa.training.workers import Workers, usable


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


def test_lambda_0_follows_a_sine_to_its_peak():
    joint = JointOptions(heads_weight=0.2)
    assert [recipe.heads_weight(joint, step, 4) for step in range(4)] == pytest.approx(
        [0.2 * math.sin(math.pi / 8 * n) for n in (1, 2, 3, 4)]
    )
    assert recipe.heads_weight(joint, 0, 1) == pytest.approx(0.2)


def test_defaults_follow_from_width_and_rows():
    rates = [recipe.default_rate(width) for width in (64, 256, 512, 4096)]
    assert rates == [5e-3, 5e-3, 1.25e-3, 1e-3]
    rows = (10, 600_000, 3_000_000, 60_000_000)
    assert [recipe.default_batch(count) for count in rows] == [256, 384, 1920, 4096]


def test_given_values_are_kept_and_others_have_defaults():
    steps, joint = StepOptions(), JointOptions()
    alone = recipe.complete(steps, hidden_size=64, num_labels=10)
    assert (alone.batch_tokens, alone.learning_rate, alone.warmup_steps) == (256, 5e-3, 50)
    mine = StepOptions(warmup_steps=0, learning_rate=1.0, batch_tokens=7)
    assert recipe.complete(mine, hidden_size=64, num_labels=10) == mine
    for written, lm_loss, peak in ((True, "kl", 0.01), (False, "cross-entropy", 0.2)):
        found, own = recipe.complete_joint(joint, steps, self_distilled=written)
        assert (found.lm_loss, found.heads_weight, own.warmup_steps) == (lm_loss, peak, 20)
    assert recipe.complete_joint(joint, mine, self_distilled=True)[1].warmup_steps == 0


def test_a_merge_may_take_hours(monkeypatch):
    received = {}

    def state(**options):
        received.update(options)
        return SimpleNamespace(process_index=0, num_processes=2, device=torch.device("cpu", 0))

    monkeypatch.setattr(accelerate, "PartialState", state)
    workers = Workers("cpu")
    assert workers.main and workers.device == torch.device("cpu")
    assert received["cpu"] and received["timeout"] >= timedelta(days=1)


@pytest.mark.parametrize("device", ["zz", "cuda:x", "absent"])
def test_a_device_that_cannot_be_used_is_named(device):
    assert usable("cpu") == torch.device("cpu")
    if device == "absent":
        device = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=rf"--device {device} can't be used here.*Use cpu"):
        usable(device)
