"""Exit statuses, and a job's progress output without a terminal."""

import pytest

from vllm_medusa.cli import console
from vllm_medusa.job import JobFailed


class Stopped(JobFailed):
    status = 7


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("x is 1 [a]"), 2, "error: x is 1 [a]\n"),
        (OSError("no disk"), 2, "error: no disk\n"),
        (JobFailed("loss is NaN"), 1, "stopped: loss is NaN\n"),
        (Stopped("a stage"), 7, "stopped: a stage\n"),
        (KeyboardInterrupt(), 130, "interrupted; resume\n"),
    ],
)
def test_status_and_text(error, status, text, capfd):
    def job(progress):
        raise error

    assert console.run_job(job, interrupted="resume") == status
    assert capfd.readouterr().err == text


def test_plain_progress_prints_occasional_lines(monkeypatch, capfd):
    now = 0.0
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)

    def job(progress):
        nonlocal now
        for seconds, *values in (
            (1.0, "states", 1, 9),
            (11.0, "states", 2, 9, "3 tok/s [x]"),
            (12.0, "states", 3, 9),
            (30.0, "texts", 4, None),
        ):
            now = seconds
            progress.at(*values)
        progress.note("a [b]")
        progress.warn("c [d]")
        return 3

    assert console.run_job(job, interrupted="") == 3
    assert capfd.readouterr().err == (
        "states: 2/9 3 tok/s [x], 70 s left\ntexts: 4\na [b]\nwarning: c [d]\n"
    )
