"""Python functions in subprocesses, which end with their parent.

A subprocess frees all its memory when it ends, also on a GPU, and isolates crashes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vllm_medusa.job import SILENT, JobFailed, Progress

Channel: TypeAlias = "Connection[Any, Any]"
R = TypeVar("R")

ERROR, _FAILED = "error", "failed"  # kinds of messages: with an exception to raise; with a text
_INTERRUPTED = 130  # exit status of a process ended by SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHOWN_LINES = 25
_SHOWN_BYTES = 1 << 16
_CAUSE_LINES = 4
_ERROR = re.compile(r"^(?!.*\b(INFO|WARNING)\b).*\w(Error|Exception|Refused)(: |$)")
_STOP_SECONDS = 60
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError, JobFailed)  # sent to the parent
_SPAWN = multiprocessing.get_context("spawn")


class Child:
    """A fresh Python process that runs ``body(channel)``; use it as a context manager.

    It has its own process group, so Ctrl-C reaches only this process. If this process is
    killed, the kernel kills the child (on Linux).
    """

    def __init__(self, name: str, body: Callable[[Channel], None], log: Path):
        """Start it: ``body`` is a module-level function; its output is appended to ``log``."""
        self._name, self._log = name, log
        self.channel, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_main, args=(body, theirs, log, os.getpid()))
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        """Return the next message of the process: its kind and a value.

        Raises an error that the process sends; JobFailed: the process ended or failed (the message
        has the end of its log); KeyboardInterrupt: it was interrupted, and this process was not.
        """
        try:
            kind, value = self.channel.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(_STOP_SECONDS)
            if self.process.exitcode == _INTERRUPTED:
                raise KeyboardInterrupt from None
            kind, value = _FAILED, f"ended with status {self.process.exitcode}"
        if kind == ERROR:
            raise value
        if kind == _FAILED:
            raise JobFailed(f"{self._name} {value}; the end of its log:\n{end_of(self._log)}")
        return kind, value

    def end(self, *, interrupt: bool = False) -> None:
        """Stop it by closing its channel, and by SIGINT if ``interrupt``; kill it if it stays."""
        self.channel.close()
        pid = self.process.pid
        assert pid is not None
        if interrupt:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)
        with suppress(KeyboardInterrupt):  # a second Ctrl-C
            self.process.join(_STOP_SECONDS)
        self.process.kill()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(interrupt=kind is not None)


def run_in_process(
    job: Callable[..., R], options: Any, progress: Progress = SILENT, *, log: Path, **more: Any
) -> R:
    """Run ``job(options, progress=progress, **more)`` in a subprocess.

    The job is a module-level function; its options and result must be picklable. The output of the
    process and the job's notes are appended to the log.

    Raises ValueError, OSError, JobFailed: raised by the job, with the same text; JobFailed: the
    process died; the text has the end of its log; KeyboardInterrupt: in either process; the job has
    been interrupted and has ended.
    """
    with Child("the job", _run, log) as child:
        child.channel.send((job, options, more))
        while (message := child.receive())[0] != "result":
            getattr(progress, message[0])(*message[1])
        result: R = message[1]
        return result


def end_of(log: Path) -> str:
    """The last lines of a log, preceded by its first error, which is often the cause."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    shown = lines[-_SHOWN_LINES:]
    earlier = lines[:-_SHOWN_LINES]
    if causes := [n for n, line in enumerate(earlier) if _ERROR.search(line)]:
        shown = [*earlier[causes[0] : causes[0] + _CAUSE_LINES], "...", *shown]
    return "\n".join(shown) or "(nothing)"


class _Sent(Progress):
    """Progress that is sent to the parent process and written to the log."""

    def __init__(self, channel: Channel):
        self._channel = channel

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        self._send("note", text)

    def warn(self, text: str) -> None:
        sys.stderr.write(f"warning: {text}\n")
        self._send("warn", text)

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        self._send("at", what, done, total, text)

    def _send(self, kind: str, *values: Any) -> None:
        with suppress(BrokenPipeError):  # the parent has ended; a signal will follow
            self._channel.send((kind, values))


def _run(channel: Channel) -> None:
    """The body of `run_in_process`."""
    job, options, more = channel.recv()
    try:
        message = ("result", job(options, progress=_Sent(channel), **more))
    except _KINDS as error:
        sys.stderr.write(f"error: {error}\n")
        kind = next(kind for kind in _KINDS if isinstance(error, kind))
        plain = kind(str(error))  # others may not be picklable
        if isinstance(error, JobFailed):
            vars(plain)["status"] = error.status
        message = (ERROR, plain)
    channel.send(message)


def _main(body: Callable[[Channel], None], channel: Channel, log: Path, parent: int) -> None:
    """Run the body in the child."""
    if sys.platform == "linux":  # the kernel ends this process when its parent ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        body(channel)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        traceback.print_exc()  # first, because the parent interrupts this process on failure
        channel.send((_FAILED, f"failed: {type(error).__name__}: {error}"))
        sys.exit(1)
