"""Commands run one after another, each finished once: what `vllm-medusa adapt` is made of.

Every stage has a folder of its own, named by a digest of its command and of the contents of all it
reads. What a folder holds is therefore of these inputs and no others: another option means another
folder, nothing is thrown away, and going back to the first option finds its folder finished. A
stage is finished when ``done.json`` stands there, written last and whole, and its outputs are as
noted in it. An unfinished folder is handed to the same command again, which goes on in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.files import digest as digest_of
from vllm_medusa.offline.children import run_logged

HERE, WORK = "{here}", "{work}"  # in a command: the stage's folder, the folder of all stages
DONE, LOG = "done.json", "log.txt"


class StageFailed(RuntimeError):
    """A stage's command ended with another status than 0."""

    def __init__(self, stage: str, status: int, log: Path):
        self.status = status
        super().__init__(f"{stage} ended with status {status}; all it said is in {log}")


class WorkFolderError(ValueError):
    """A work folder that can't be used."""


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: of the stage, as in the folder's name.
        command: `vllm-medusa`'s arguments, with `HERE` for the stage's folder, `WORK` for the work
            folder and the work folder's own names for other places, so that neither a moved folder
            nor another path to the same contents is another stage. Empty: `prepare` is all of it.
        inputs: what the outcome depends on beside the command, as digests by name.
        outputs: files that it leaves in its folder.
        module: what is run with the arguments.
        accepted: exit statuses of success.

    """

    name: str
    command: Sequence[str]
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    module: str = "vllm_medusa.cli"
    accepted: Sequence[int] = (0,)

    @property
    def key(self) -> str:
        """The digest in the folder's name."""
        text = json.dumps([list(self.command), dict(self.inputs)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class WorkFolder:
    """The folder of all stages, locked; use it as a context manager."""

    def __init__(self, folder: Path, console: Console, count: int, places: Mapping[str, str]):
        """Take the folder.

        Args:
            folder: made if it isn't there.
            console: where stages are announced and their output goes.
            count: of stages that will be run.
            places: what other names in braces in commands stand for.

        """
        self.folder, self.console, self.count = folder, console, count
        self.places = {**places, WORK: str(folder)}
        self.number = 0
        self.seconds: dict[str, float] = {}  # of every stage, whenever it was run
        self.commands: dict[str, str] = {}

    def __enter__(self) -> WorkFolder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise WorkFolderError(
                f"{self.folder} can't be the work folder: {error.strerror}. Name another by --work."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise WorkFolderError(
                f"{self.folder}: another adapt is working in it. Wait for it, or name another "
                "folder by --work."
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def run(
        self,
        stage: Stage,
        prepare: Callable[[Path], None] | None = None,
        complete: Callable[[Path], bool] | None = None,
    ) -> Path:
        """Bring a stage to its end, unless it is there already; returns its folder.

        Args:
            stage: what to run.
            prepare: called with the folder before every attempt, to put there what the command
                changes in place and to remove what it would stumble over.
            complete: called with the folder after a command that left its outputs; False if there
                is less in them than there has to be.

        Raises:
            StageFailed: the command failed; what it left stays for the next attempt.

        """
        here = self.folder / f"{stage.name}-{stage.key}"
        arguments = [self._place(part, here) for part in stage.command]
        program = (
            ["vllm-medusa"] if stage.module == "vllm_medusa.cli" else ["python", "-m", stage.module]
        )
        command = shlex.join([*program, *arguments]) if arguments else "(no command)"
        self.commands[stage.name] = command
        self.number += 1
        head = f"[bold]{self.number}/{self.count} {stage.name}[/]"
        if (seconds := self._finished(stage, here)) is not None:
            self.console.print(f"{head}: done before ({_duration(seconds)})")
            self.seconds[stage.name] = seconds
            return here
        self.console.print(f"{head}: {escape(command)}", soft_wrap=True)
        here.mkdir(exist_ok=True)
        if prepare is not None:
            prepare(here)
        start, status = time.monotonic(), 0
        if arguments:
            status = run_logged(
                [sys.executable, "-m", stage.module, *arguments], here / LOG, self.console.file
            )
            if status not in stage.accepted:
                raise StageFailed(stage.name, status, here / LOG)
        missing = [name for name in stage.outputs if not (here / name).is_file()]
        if missing:
            raise StageFailed(f"{stage.name} left no {missing[0]} and", status, here / LOG)
        if complete is not None and not complete(here):
            raise StageFailed(f"{stage.name} broke off and", status, here / LOG)
        self.seconds[stage.name] = time.monotonic() - start
        write_json(
            here / DONE,
            {
                "command": [*program, *arguments],
                "inputs": dict(stage.inputs),
                "outputs": {name: digest_of(here / name) for name in stage.outputs},
                "seconds": round(self.seconds[stage.name], 1),
            },
        )
        return here

    def _place(self, part: str, here: Path) -> str:
        for name, value in {**self.places, HERE: str(here)}.items():
            part = part.replace(name, value)
        return part

    def _finished(self, stage: Stage, here: Path) -> float | None:
        """The seconds that a finished stage took; None if it is not finished, or was changed."""
        try:
            done = json.loads((here / DONE).read_bytes())
            outputs = {name: digest_of(here / name) for name in stage.outputs}
            return float(done["seconds"]) if done["outputs"] == outputs else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file so that readers, even after a power cut, see nothing or all of it."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
