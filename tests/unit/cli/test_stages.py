import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vllm_medusa.cli.stages import HERE, WORK, Stage, StageFailed, WorkFolder, WorkFolderError

PLACE = "{data}"


class Work:
    """A work folder whose stages are run by `python -m json.tool`, which copies JSON."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = folder / "data.json"
        self.data.write_text('{"a": 1}')
        self.said = ""

    def run(self, *stages: Stage, place: Path | None = None) -> list[Path]:
        console = Console(file=io.StringIO(), width=1000)
        places = {PLACE: str(place or self.data)}
        try:
            with WorkFolder(self.folder / "work", console, len(stages), places) as work:
                return [work.run(stage) for stage in stages]
        finally:
            self.said = console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def copy(name: str = "copy", *options: str, **inputs: str) -> Stage:
    command = [*options, PLACE, f"{HERE}/out.json"]
    return Stage(name, command, inputs, ["out.json"], module="json.tool")


def test_a_stage_runs_once_and_is_announced(work: Work) -> None:
    (folder,) = work.run(copy())
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}
    assert f"1/1 copy: python -m json.tool {work.data} {folder}/out.json" in work.said
    done = (folder / "done.json").stat().st_mtime_ns
    assert work.run(copy()) == [folder]
    assert "done before" in work.said
    assert (folder / "done.json").stat().st_mtime_ns == done


def test_other_inputs_or_options_are_another_stage_and_nothing_is_lost(work: Work) -> None:
    (first,) = work.run(copy(data="one"))
    (second,) = work.run(copy(data="two"))
    (third,) = work.run(copy("copy", "--compact", data="one"))
    assert len({first, second, third}) == 3
    assert work.run(copy(data="one")) == [first]
    assert "done before" in work.said


def test_a_path_alone_is_no_difference(work: Work) -> None:
    (first,) = work.run(copy())
    moved = work.data.rename(work.folder / "elsewhere.json")
    assert work.run(copy(), place=moved) == [first]
    assert "done before" in work.said


@pytest.mark.parametrize("damage", ["changed", "removed", "torn marker", "no marker"])
def test_a_stage_whose_result_is_not_as_noted_runs_again(work: Work, damage: str) -> None:
    (folder,) = work.run(copy())
    if damage == "changed":
        (folder / "out.json").write_text("[]")
    elif damage == "removed":
        (folder / "out.json").unlink()
    elif damage == "torn marker":
        (folder / "done.json").write_text('{"outputs": {')
    else:
        (folder / "done.json").unlink()
    work.run(copy())
    assert "done before" not in work.said
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}


def test_a_failure_names_the_log_and_is_no_result(work: Work) -> None:
    with pytest.raises(StageFailed, match=r"copy ended with status 2; .*log\.txt") as failure:
        work.run(copy(), place=work.folder / "missing.json")
    assert failure.value.status == 2
    (log,) = (work.folder / "work").glob("copy-*/log.txt")
    assert "missing.json" in log.read_text()
    work.run(copy())
    assert "done before" not in work.said


def test_a_command_that_leaves_nothing_has_failed(work: Work) -> None:
    stage = Stage("copy", [PLACE], {}, ["out.json"], module="json.tool")
    with pytest.raises(StageFailed, match=r"left no out\.json"):
        work.run(stage)


def test_a_stage_reads_an_earlier_one(work: Work) -> None:
    (first,) = work.run(copy())
    second = Stage(
        "next",
        [f"{WORK}/{first.name}/out.json", f"{HERE}/out.json"],
        {},
        ["out.json"],
        module="json.tool",
    )
    _, folder = work.run(copy(), second)
    assert (folder / "out.json").read_bytes() == (first / "out.json").read_bytes()
    assert "2/2 next" in work.said


def test_what_prepares_a_stage_is_called_before_each_attempt_only(work: Work) -> None:
    called = []
    console = Console(file=io.StringIO())
    stage = Stage("alone", [], {}, ["made"])

    def make(here: Path) -> None:
        called.append(here)
        (here / "made").touch()

    with WorkFolder(work.folder / "work", console, 1, {}) as folder:
        folder.run(stage, make)
        folder.run(stage, make)
    assert len(called) == 1


def test_two_at_once_are_refused(work: Work) -> None:
    console = Console(file=io.StringIO())
    with (
        WorkFolder(work.folder / "work", console, 1, {}),
        pytest.raises(WorkFolderError, match="another adapt"),
        WorkFolder(work.folder / "work", console, 1, {}),
    ):
        pass
    with pytest.raises(WorkFolderError, match="can't be the work folder"):
        WorkFolder(work.data / "work", console, 1, {}).__enter__()
