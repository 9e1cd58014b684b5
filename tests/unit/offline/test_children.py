import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support import jobs
from support.commands import RecordingProgress

from vllm_medusa.job import JobFailed
from vllm_medusa.offline import process
from vllm_medusa.offline.children import Child, end_of, run_in_process
from vllm_medusa.offline.engine import Sampling

PARENT = """
import signal, sys
from pathlib import Path
from support import jobs
from vllm_medusa.offline.children import run_in_process
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    run_in_process(jobs.sleep, Path(sys.argv[1]), log=Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def wait_for(condition: object) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def running(tmp_path, log):
    """A process that runs a sleeping job, and the job's process id."""
    file = tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file), str(log)], env=environment)
    wait_for(lambda: file.exists() and file.read_text())
    return parent, int(file.read_text())


def test_a_job_gets_options_and_returns_a_result(log):
    progress = RecordingProgress()
    options, command, pid = run_in_process(jobs.report, {"a": 1}, progress, log=log, command=["b"])
    assert (options, command) == ({"a": 1}, ["b"])
    assert gone(pid)
    assert (progress.notes, progress.warnings) == (["noted"], ["warned"])
    assert progress.counts == [("texts", 1, 2, "half")]


def test_processes_of_a_job_end_with_it(log):
    left = run_in_process(jobs.leave, None, log=log)
    wait_for(lambda: gone(left))


def test_output_is_appended_to_the_log(log):
    log.write_text("before\n")
    run_in_process(jobs.report, None, log=log)
    lines = log.read_text().splitlines()
    assert lines[0] == "before"
    said = {"printed", "written", "by a child", "noted", "warning: warned"}
    assert set(lines[1:]) == said


@pytest.mark.parametrize("error", [ValueError("no"), FileNotFoundError(2, "no", "x")])
def test_errors_keep_type_and_text(log, error):
    with pytest.raises(OSError if isinstance(error, OSError) else ValueError) as raised:
        run_in_process(jobs.fail, error, log=log)
    assert str(raised.value) == str(error) and str(error) in log.read_text()


@pytest.mark.parametrize(
    ("job", "argument", "message", "status", "logged"),
    [
        (jobs.broken, "mend it", "mend it", 3, ""),
        (jobs.fail, RuntimeError("a fault"), "the job failed: RuntimeError: a", 1, "in fail\n"),
        (jobs.die, signal.SIGKILL, r"job ended with status -9;[^$]*the last words", 1, ""),
    ],
)
def test_failures_keep_their_status_and_exceptions_their_traceback(
    log, job, argument, message, status, logged
):
    with pytest.raises(JobFailed, match=message) as raised:
        run_in_process(job, argument, log=log)
    assert raised.value.status == status and logged in log.read_text()


def test_an_interrupted_job_interrupts_its_caller(log):
    with pytest.raises(KeyboardInterrupt):
        run_in_process(jobs.die, signal.SIGINT, log=log)


def test_a_killed_command_ends_its_child(running):
    process, child = running
    process.kill()
    process.wait(60)
    wait_for(lambda: gone(child))


def test_an_interruption_reaches_the_child_which_may_finish(running, tmp_path):
    process, child = running
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert gone(child)
    assert (tmp_path / "pid.interrupted").exists()


def test_an_engine_is_killed_if_its_start_is_interrupted(monkeypatch):
    """Closing its channel would end it only after the start."""
    children = []

    class Interrupted(Child):
        def receive(self):
            children.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "serve", jobs.wait_until_closed)
    monkeypatch.setattr(process, "Child", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.EngineProcess({}, Sampling())
    assert children[0].process.exitcode == -signal.SIGKILL


def test_the_end_of_a_log_begins_with_its_first_error(log):
    """vLLM's last lines only say that the engine core failed."""
    numbers = list(map(str, range(40)))
    cause, last = ["ERROR ValueError: no memory:", "- too little"], "RuntimeError: see above"
    log.write_text("\n".join(["INFO no ImportError: x", *cause, *numbers, last]))
    shown = end_of(log).splitlines()
    assert shown[:6] == [*cause, "0", "1", "...", "16"]
    assert shown[-1] == last
    log.write_text("\n".join([*cause, last]))
    assert end_of(log).splitlines() == [*cause, last]
