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

_FAILED = "failed"
_INTERRUPTED = 130  # exit status of a process ended by SIGINT
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHOWN_LINES = 25
_SHOWN_BYTES = 1 << 14
_STOP_SECONDS = 60
_KINDS = {"ValueError": ValueError, "OSError": OSError, "JobFailed": JobFailed}


class Child:
    """A fresh Python process that runs ``body(channel)``; use it as a context manager.

    It has its own process group, so Ctrl-C reaches only this process. If this process is
    killed, the kernel kills the child (on Linux).
    """

    def __init__(self, name: str, body: Callable[[Channel], None], log: IO[bytes]):
        """Start it: ``body`` is a module-level function, ``log`` receives the process's output."""
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
        self.channel.send(sys.path)  # first, because later messages are imported from there
        self.channel.send(body)

    def receive(self) -> Any:
        """Return the next message of the process: a pair of a word and a value.

        Raises JobFailed: it ended or failed; the message has the end of its log; KeyboardInterrupt:
        it was interrupted, but this process was not.
        """
        try:
            message = self.channel.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait(_STOP_SECONDS)
            if status == _INTERRUPTED:
                raise KeyboardInterrupt from None
            message = _FAILED, f"ended with status {status}"
        if message[0] != _FAILED:
            return message
        log = end_of(self._log.fileno()) or "(nothing)"
        raise JobFailed(f"{self._name} {message[1]}; the end of its log:\n{log}")

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

    The job is a module-level function; its options and result must be picklable.
    The process's output and notes are appended to the log.

    Raises:
        ValueError, OSError, JobFailed: raised by the job, with the same text.
        JobFailed: the process died; the text has the end of its log.
        KeyboardInterrupt: in either process; the job has been interrupted and has ended.

    """
    with log.open("a+b") as file, Child("the job", _run, file) as child:
        child.channel.send((job, options, more))
        while True:
            kind, values = child.receive()
            if kind == "result":
                result: R = values
                return result
            if kind in _KINDS:
                text, status = values
                error = _KINDS[kind](text)
                if isinstance(error, JobFailed):
                    error.status = status
                raise error
            getattr(progress, kind)(*values)


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
        with suppress(BrokenPipeError):  # the parent has ended; a signal will follow
            self._channel.send((kind, values))


def _run(channel: Channel) -> None:
    """The body of `run_in_process`."""
    job, options, more = channel.recv()
    try:
        message = ("result", job(options, progress=_Sent(channel), **more))
    except (ValueError, OSError, JobFailed) as error:
        kind = next(name for name, each in _KINDS.items() if isinstance(error, each))
        sys.stderr.write(f"error: {error}\n")
        message = (kind, (str(error), getattr(error, "status", None)))
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    channel: Channel = Connection(int(descriptor))
    try:
        sys.path[:] = channel.recv()
        channel.recv()(channel)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        traceback.print_exc()  # first, because the reader of the failure interrupts this process
        channel.send((_FAILED, f"failed: {type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
