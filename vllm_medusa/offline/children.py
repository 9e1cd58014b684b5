"""Python functions in subprocesses, which end with their parent.

A subprocess frees all its memory when it ends, also on a GPU, and isolates crashes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from vllm_medusa.job import SILENT, JobFailed, Progress

Channel: TypeAlias = "Connection[Any, Any]"
R = TypeVar("R")

ERROR, _FAILED = "error", "failed"  # messages: an exception to raise; a text
_INTERRUPTED = 130  # the status of a process that SIGINT ended
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHOWN_LINES = 25
_SHOWN_BYTES = 1 << 14
_STOP_SECONDS = 60
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError, JobFailed)


class Child:
    """A fresh Python process that runs ``body(channel)``; use it as a context manager.

    It has a process group of its own, so Ctrl-C reaches this process only. If this process is
    killed, the kernel kills the child (on Linux).
    """

    def __init__(self, name: str, body: Callable[[Channel], None], log: IO[bytes]):
        """Start it: ``body`` is a function of a module, ``log`` gets what the process prints."""
        self._name, self._log = name, log
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.channel: Channel = Connection(ours.detach())
        self.channel.send(sys.path)  # on its own: what follows is imported from there
        self.channel.send(body)

    def receive(self) -> tuple[str, Any]:
        """Return what the process sends next: a pair of a word and something.

        Raises the error that it sends; JobFailed: it ended or failed, and the message has the end
        of its log; KeyboardInterrupt: it was interrupted, and this process was not.
        """
        try:
            kind, value = self.channel.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait(_STOP_SECONDS)
            if status == _INTERRUPTED:
                raise KeyboardInterrupt from None
            kind, value = _FAILED, f"ended with status {status}"
        if kind == ERROR:
            raise value
        if kind == _FAILED:
            log = end_of(self._log.fileno()) or "(nothing)"
            raise JobFailed(f"{self._name} {value}; the end of its log:\n{log}")
        return kind, value

    def end(self, *, interrupt: bool = False) -> None:
        """Stop it by closing its channel or by SIGINT, wait, and kill it if needed."""
        self.channel.close()
        if interrupt:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C
            self.process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(interrupt=kind is not None)


def run_in_process(
    job: Callable[..., R], options: Any, progress: Progress = SILENT, *, log: Path, **more: Any
) -> R:
    """Run ``job(options, progress=progress, **more)`` in a subprocess.

    The job is a function of a module; its options and result have to be values that can be pickled.
    The process's output and the notes are appended to the log.

    Raises:
        ValueError, OSError, JobFailed: what the job raises, with its text.
        JobFailed: the process broke off; the text has the end of its log.
        KeyboardInterrupt: here or there; the job has been interrupted and has ended.

    """
    with log.open("a+b") as file, Child("the job", _run, file) as child:
        child.channel.send((job, options, more))
        while (message := child.receive())[0] != "result":
            getattr(progress, message[0])(*message[1])
        result: R = message[1]
        return result


def end_of(log: int) -> str:
    """The last lines of an open file."""
    size = os.fstat(log).st_size
    end = os.pread(log, _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
    return "\n".join(end.decode(errors="replace").splitlines()[-_SHOWN_LINES:])


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
        with suppress(BrokenPipeError):  # the parent has gone; a signal will follow
            self._channel.send((kind, values))


def _run(channel: Channel) -> None:
    """The body of `run_in_process`."""
    job, options, more = channel.recv()
    try:
        message = ("result", job(options, progress=_Sent(channel), **more))
    except (ValueError, OSError, JobFailed) as error:
        sys.stderr.write(f"error: {error}\n")
        kind = next(kind for kind in _KINDS if isinstance(error, kind))
        plain = kind(str(error))  # other kinds may not be picklable
        if isinstance(error, JobFailed):
            vars(plain)["status"] = error.status
        message = (ERROR, plain)
    channel.send(message)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux); called in the child."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _main(descriptor: str, parent: str) -> None:
    """Run the received body; ends the process."""
    _die_with(int(parent))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    channel: Channel = Connection(int(descriptor))
    try:
        sys.path[:] = channel.recv()
        channel.recv()(channel)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        traceback.print_exc()  # first: who reads the failure interrupts this process
        channel.send((_FAILED, f"failed: {type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
