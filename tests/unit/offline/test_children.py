import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_medusa.offline.children import run_logged

# A command that says who it is, and what happened to it.
SLEEPER = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
try:
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1] + ".interrupted", "w").close()
    sys.exit(130)
"""
PARENT = """
import signal, sys
from pathlib import Path
from vllm_medusa.offline.children import run_logged
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell's background ignore it
try:
    run_logged([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[3]), sys.stderr)
except KeyboardInterrupt:
    sys.exit(130)
"""


def wait_for(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def running(tmp_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process that runs the sleeper, and the sleeper's process id."""
    told = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, SLEEPER, str(told), str(tmp_path / "log")]
    process = subprocess.Popen(command)
    wait_for(lambda: told.exists() and told.read_text())
    return process, int(told.read_text())


def test_a_killed_command_takes_its_child_along(
    running: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, child = running
    process.kill()
    process.wait(10)
    wait_for(lambda: gone(child), 10)


def test_an_interruption_reaches_the_child_which_may_end_well(
    running: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    process, child = running
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert gone(child)
    assert (tmp_path / "pid.interrupted").exists()


def test_status_and_output_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shown = io.StringIO()
    code = "import sys; print('said'); sys.stderr.write('warned'); sys.exit(3)"
    assert run_logged([sys.executable, "-c", code], log, shown) == 3
    assert sorted(log.read_text().replace("warned", "\nwarned").split()) == ["said", "warned"]
    assert "said" in shown.getvalue()
    assert run_logged([sys.executable, "-c", "print('again')"], log, shown) == 0
    assert "said" in log.read_text()  # a later attempt is appended
    assert "again" in log.read_text()


def test_a_descendant_that_stays_does_not_hold_it_up(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '30']).pid)"
    start = time.monotonic()
    assert run_logged([sys.executable, "-c", code], tmp_path / "log", io.StringIO()) == 0
    assert time.monotonic() - start < 20
    os.kill(int((tmp_path / "log").read_text()), signal.SIGKILL)


def test_on_a_terminal_the_child_has_one(tmp_path: Path) -> None:
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as shown:
        code = "import sys; print(sys.stderr.isatty())"
        assert run_logged([sys.executable, "-c", code], tmp_path / "log", shown) == 0
        assert (tmp_path / "log").read_text().strip() == "True"
        assert b"True" in os.read(reading, 100)
    os.close(reading)
