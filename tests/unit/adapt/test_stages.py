import json
from pathlib import Path

import pytest
from support import jobs
from support.commands import RecordingProgress
from support.jobs import CopyOptions

from vllm_medusa.adapt.stages import Stage, WorkFolder
from vllm_medusa.files import FileRefused
from vllm_medusa.job import SILENT, JobFailed


class Work:
    """A work folder whose stage copies a JSON file, in this process unless ``real``."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder, self.data, self.patch = folder / "work", folder / "data.json", patch
        self.data.write_text('{"a": 1}')
        self.said = ""

    def copy(self, *inputs, job=jobs.copy, to: Path | None = None, compact=False, real=False):
        def options(here: Path) -> CopyOptions:
            return CopyOptions(data=self.data, output=to or here / "out.json", compact=compact)

        stage = Stage("copy", "a file", job, options, ["out.json"])
        recorded = RecordingProgress()
        with self.patch.context() as patch:
            if not real:
                here = lambda job, options, progress, log, command: job(options, progress)  # noqa: E731
                patch.setattr("vllm_medusa.adapt.stages.run_in_process", here)
            try:
                with WorkFolder(self.folder, recorded, inputs) as work:
                    work.run([stage])
                    return work.at("copy")
            finally:
                self.said = "".join(f"{note}\n" for note in recorded.notes)


@pytest.fixture
def work(tmp_path, monkeypatch):
    return Work(tmp_path, monkeypatch)


def test_a_stage_runs_once_and_is_announced(work):
    folder = work.copy(real=True)
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}
    assert "1/1 copy: a file\ncopied\n" in work.said
    assert (folder / "log.txt").read_text() == "copied\n"
    command = ["vllm-medusa", "copy", "--data", str(work.data), "--output", f"{folder}/out.json"]
    assert json.loads((folder / "done.json").read_text())["command"] == command
    done = (folder / "done.json").stat().st_mtime_ns
    assert work.copy(real=True) == folder
    assert "1/1 copy: already done" in work.said
    assert (folder / "done.json").stat().st_mtime_ns == done


def test_other_inputs_or_options_rerun_a_stage_but_other_paths_do_not(work, tmp_path, monkeypatch):
    first = work.copy("one")
    assert len({first, work.copy("two"), work.copy("one", compact=True)}) == 3
    work.data = work.data.rename(tmp_path / "elsewhere.json")
    monkeypatch.chdir(tmp_path)
    work.folder = Path("work")
    assert work.copy("one").resolve() == first
    assert "already done" in work.said


@pytest.mark.parametrize(
    ("name", "left"),
    [("out.json", "[]"), ("out.json", None), ("done.json", '{"outputs": {'), ("done.json", None)],
)
def test_a_stage_with_a_changed_result_runs_again(work, name, left):
    folder = work.copy()
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_text(left)
    work.copy()
    assert "already done" not in work.said
    assert json.loads((folder / "out.json").read_text()) == {"a": 1}


def test_a_refusal_names_the_log_and_is_not_a_result(work, tmp_path):
    moved = work.data.rename(tmp_path / "elsewhere.json")
    with pytest.raises(JobFailed, match=r"copy: .*data\.json(.|\n)*log\.txt") as failure:
        work.copy(real=True)
    assert failure.value.status == 2
    moved.rename(work.data)
    work.copy()
    assert "already done" not in work.said


@pytest.mark.parametrize(
    ("job", "message", "status"),
    [(jobs.broken, "copy: ", 3), (jobs.copy, r"not write out\.json", 1)],
)
def test_a_job_that_fails_or_leaves_nothing(work, tmp_path, job, message, status):
    with pytest.raises(JobFailed, match=message) as failure:
        work.copy(job=job, to=tmp_path / "lost.json")
    assert failure.value.status == status


def test_concurrent_runs_are_refused(work):
    with (
        WorkFolder(work.folder, SILENT),
        pytest.raises(FileRefused, match="another process"),
        WorkFolder(work.folder, SILENT),
    ):
        pass
