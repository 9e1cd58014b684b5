import json
from pathlib import Path

import pytest
from support import jobs
from support.jobs import CopyOptions

from vllm_medusa.adapt.stages import Stage, StageFailed, WorkFolder
from vllm_medusa.files import FileRefused
from vllm_medusa.job import SILENT, Progress


class Said(Progress):
    def __init__(self) -> None:
        self.text = ""

    def note(self, text: str) -> None:
        self.text += f"{text}\n"


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
        said = Said()
        try:
            with WorkFolder(self.folder, len(stages), said) as work:
                return [work.run(stage) for stage in stages]
        finally:
            self.said = said.text


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
@pytest.mark.parametrize("damage", ["changed", "removed", "torn marker", "no marker"])
def test_a_stage_whose_result_is_not_as_noted_runs_again(work, damage):
    (folder,) = work.run(work.copy())
    if damage == "changed":
        (folder / "out.json").write_text("[]")
    elif damage == "removed":
        (folder / "out.json").unlink()
    elif damage == "torn marker":
        (folder / "done.json").write_text('{"outputs": {')
    else:
        (folder / "done.json").unlink()
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
def test_a_failure_keeps_its_status(work):
    stage = Stage("fails", jobs.broken, lambda here: CopyOptions(data=here, output=here), {})
    with pytest.raises(StageFailed, match="fails: ") as failure:
        work.run(stage)
    assert failure.value.status == 3


@pytest.mark.usefixtures("here")
def test_a_job_that_leaves_nothing_has_failed(work):
    options = CopyOptions(data=work.data, output=work.data.parent / "lost.json")
    stage = Stage("copy", jobs.copy, lambda here: options, {}, ["out.json"])
    with pytest.raises(StageFailed, match=r"left no out\.json") as failure:
        work.run(stage)
    assert failure.value.status == 1


@pytest.mark.usefixtures("here")
def test_what_prepares_a_stage_is_called_before_each_attempt_only(work):
    called = []
    stage = Stage(
        "copy",
        jobs.copy,
        lambda here: CopyOptions(data=work.data, output=here / "out.json"),
        {},
        ["out.json"],
        prepare=called.append,
    )
    assert work.run(stage) == called
    assert work.run(stage) == called


def test_two_at_once_are_refused(work):
    with (
        WorkFolder(work.folder, 1, SILENT),
        pytest.raises(FileRefused, match="another adapt"),
        WorkFolder(work.folder, 1, SILENT),
    ):
        pass
    with pytest.raises(FileRefused, match="can't be the work folder"):
        WorkFolder(work.data / "work", 1, SILENT).__enter__()
