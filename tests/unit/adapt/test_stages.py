import json
from pathlib import Path

import pytest
from support import jobs
from support.jobs import CopyOptions
from support.told import Told

from vllm_medusa.adapt.stages import Stage, StageFailed, WorkFolder
from vllm_medusa.files import FileRefused
from vllm_medusa.job import SILENT


class Work:
    """A work folder whose stages copy a file of JSON."""

    def __init__(self, folder: Path):
        self.folder = folder / "work"
        self.data = folder / "data.json"
        self.data.write_text('{"a": 1}')
        self.said = ""

    def copy(self, name: str = "copy", compact: bool = False, **inputs: str) -> Stage:
        data = self.data
        return Stage(
            name,
            jobs.copy,
            lambda here: CopyOptions(data=data, output=here / "out.json", compact=compact),
            inputs,
            ["out.json"],
            "copy-json",
        )

    def run(self, *stages: Stage) -> list[Path]:
        told = Told()
        try:
            with WorkFolder(self.folder, len(stages), told) as work:
                return [work.run(stage) for stage in stages]
        finally:
            self.said = "".join(f"{note}\n" for note in told.notes)


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


@pytest.fixture
def here(monkeypatch):
    """Jobs run in this process, which is quicker."""

    def run(job, options, progress, *, log, **more):
        return job(options, progress, **more)

    monkeypatch.setattr("vllm_medusa.adapt.stages.run_in_process", run)


def test_a_stage_runs_once_and_is_announced(work):
    (folder,) = work.run(work.copy())
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}
    command = f"vllm-medusa copy-json --data {work.data} --output {folder}/out.json"
    assert f"1/1 copy: {command}\ncopied\n" in work.said
    assert (folder / "log.txt").read_text() == "copied\n"
    done = (folder / "done.json").stat().st_mtime_ns
    assert work.run(work.copy()) == [folder]
    assert "1/1 copy: done before" in work.said
    assert (folder / "done.json").stat().st_mtime_ns == done


@pytest.mark.usefixtures("here")
def test_other_inputs_or_options_are_another_stage_and_nothing_is_lost(work):
    (first,) = work.run(work.copy(data="one"))
    (second,) = work.run(work.copy(data="two"))
    (third,) = work.run(work.copy(compact=True, data="one"))
    assert len({first, second, third}) == 3
    assert work.run(work.copy(data="one")) == [first]
    assert "done before" in work.said


@pytest.mark.usefixtures("here")
def test_a_path_alone_is_no_difference(work, tmp_path, monkeypatch):
    (first,) = work.run(work.copy())
    work.data = work.data.rename(tmp_path / "elsewhere.json")
    monkeypatch.chdir(tmp_path)
    work.folder = Path("work")
    (second,) = work.run(work.copy())
    assert second.resolve() == first
    assert "done before" in work.said


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "left"),
    [("out.json", "[]"), ("out.json", None), ("done.json", '{"outputs": {'), ("done.json", None)],
)
def test_a_stage_whose_result_is_not_as_noted_runs_again(work, name, left):
    (folder,) = work.run(work.copy())
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_text(left)
    work.run(work.copy())
    assert "done before" not in work.said
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}


def test_a_refusal_names_the_log_and_is_no_result(work, tmp_path):
    moved = work.data.rename(tmp_path / "elsewhere.json")
    with pytest.raises(StageFailed, match=r"copy: .*data\.json(.|\n)*log\.txt") as failure:
        work.run(work.copy())
    assert failure.value.status == 2
    (log,) = work.folder.glob("copy-*/log.txt")
    assert "data.json" in log.read_text()
    moved.rename(work.data)
    work.run(work.copy())
    assert "done before" not in work.said


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("job", "message", "status"), [(jobs.broken, "copy: ", 3), (jobs.copy, r"left no out\.json", 1)]
)
def test_a_job_that_fails_or_leaves_nothing(work, job, message, status):
    options = CopyOptions(data=work.data, output=work.data.parent / "lost.json")
    with pytest.raises(StageFailed, match=message) as failure:
        work.run(Stage("copy", job, lambda here: options, {}, ["out.json"]))
    assert failure.value.status == status


def test_two_at_once_are_refused(work):
    with (
        WorkFolder(work.folder, 1, SILENT),
        pytest.raises(FileRefused, match="another process"),
        WorkFolder(work.folder, 1, SILENT),
    ):
        pass
    with pytest.raises(OSError, match="data"):
        WorkFolder(work.data / "work", 1, SILENT)
