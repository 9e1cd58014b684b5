"""Jobs for subprocesses, controlled by their options."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_medusa.job import SILENT, JobFailed, Progress
from vllm_medusa.options import Options, option


class Broken(JobFailed):
    status = 3


def report(options: Any, progress: Progress = SILENT, *, command: Any = ()) -> Any:
    """Write output and messages in every way; return the options and the other arguments."""
    print("printed")
    sys.stderr.write("written\n")
    os.system("echo by a child")
    progress.note("noted")
    progress.warn("warned")
    progress.at("texts", 1, 2, "half")
    return options, command, os.getpid()


def fail(options: Exception, progress: Progress = SILENT) -> None:
    raise options


def broken(options: object, progress: Progress = SILENT, command: Any = ()) -> None:
    raise Broken(str(options))


def die(options: int, progress: Progress = SILENT) -> None:
    """Exit through a signal."""
    print("the last words", flush=True)
    os.kill(os.getpid(), options)
    time.sleep(600)


def sleep(options: Path, progress: Progress = SILENT) -> None:
    """Record this process's id, and whether it was interrupted."""
    options.write_text(str(os.getpid()))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        options.with_suffix(".interrupted").touch()
        raise


def leave(options: object, progress: Progress = SILENT) -> int:
    """Return while a child process is still running; returns its process id."""
    return subprocess.Popen(["sleep", "600"]).pid


class CopyOptions(Options):
    """Options of `copy`."""

    data: Path = option()
    output: Path = option()
    compact: bool = option(default=False)


def copy(options: CopyOptions, progress: Progress = SILENT, command: Sequence[str] = ()) -> None:
    """Copy a JSON file."""
    value = json.loads(options.data.read_text())
    options.output.write_text(json.dumps(value, indent=None if options.compact else 1))
    progress.note("copied")


def wait_until_closed(channel):
    """The body of a `Child`: ignores what it receives."""
    with suppress(EOFError):
        while True:
            channel.recv()
