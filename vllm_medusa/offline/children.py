"""Child processes that never outlive the command that started them, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP_SECONDS = 60


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; called in the child.

    Works on Linux; elsewhere it does nothing, and only a parent that ends by itself, or by Ctrl-C,
    takes its children along.

    Args:
        parent: the process id of the parent, which may have ended before this call.

    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_logged(command: Sequence[str], log: Path, shown: IO[str]) -> int:
    """Run a command to its end, with all it prints shown and appended to a file.

    On a terminal the command has a terminal too, so its progress bars work. It runs in a process
    group of its own: Ctrl-C reaches only this process, which hands it on and waits for the end. If
    this process is killed, the kernel kills the command.

    Returns:
        The exit status; a signal's number, negated, if one ended it.

    """
    parent = os.getpid()
    reading, writing = _terminal(shown) if shown.isatty() else os.pipe()
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            process_group=0,
            preexec_fn=lambda: die_with(parent),
        )
    finally:
        os.close(writing)
    try:
        with log.open("ab") as file:
            _copy(reading, process, file, shown)
        return process.wait()
    except BaseException:
        _stop(process)
        raise
    finally:
        os.close(reading)


def _terminal(shown: IO[str]) -> tuple[int, int]:
    """Both ends of a new terminal of the shown one's size."""
    reading, writing = os.openpty()
    size = fcntl.ioctl(shown.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing


def _copy(reading: int, process: subprocess.Popen[bytes], log: IO[bytes], shown: IO[str]) -> None:
    """Until the command has ended: a descendant of it may keep the other end open."""
    while True:
        ended = process.poll() is not None
        ready, _, _ = select.select([reading], [], [], 0 if ended else 0.5)
        if ready:
            try:
                data = os.read(reading, 1 << 16)
            except OSError:  # a terminal whose other end is closed
                data = b""
            if data:
                log.write(data)
                log.flush()
                shown.write(data.decode(errors="replace"))
                shown.flush()
                continue
            return
        if ended:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the command's group, wait, and kill what is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
