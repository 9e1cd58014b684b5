"""Jobs run one after another, each finished once.

Every stage has a folder of its own, named by a digest of its options and of the contents of all it
reads: other options use another folder, and nothing is thrown away. A stage is finished when
``done.json`` is there, written last, and its outputs are as noted in it. An unfinished folder is
handed to the same job again, which resumes in it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.files import Run, digest, digest_json, read_json, write_json
from vllm_medusa.job import JobFailed, Progress, duration
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.engine import without_memory
from vllm_medusa.options import Options, command_line, values_of

DONE, LOG = "done.json", "log.txt"
# Options that say where something is: no difference, since what is there is in `inputs`.
PLACES = {"model", "target", "heads", "prompts", "data", "heldout", "output", "draw"}
MACHINE = {"batch"}  # follows from the memory that is available, as engines' `MEMORY_OPTIONS` do


class StageFailed(JobFailed):
    """A stage that failed; ``status`` is 2 if it refused what it was given."""


@dataclass(frozen=True)
class Stage:
    """One call of a job."""

    name: str  # of the stage, as in the folder's name
    job: Callable[..., Any]  # a function of a module; it runs in a process of its own
    options: Callable[[Path], Options | dict[str, Any]]  # of the job, given the stage's folder
    inputs: Mapping[str, str]  # what its result depends on beside the options, as digests by name
    outputs: Sequence[str] = ()  # files that it leaves in its folder
    command: str = ""  # of `vllm-medusa`, that does the same; "": there is none
    # before every attempt, puts there what the job changes in place
    prepare: Callable[[Path], None] = lambda here: None
    what: str = ""  # it does, where there is no command

    @property
    def key(self) -> str:
        """The digest in the folder's name, wherever the folders are and however they are named."""
        options = self.options(Path())
        values = options if isinstance(options, dict) else values_of(options)
        settings = {name: value for name, value in values.items() if name not in PLACES | MACHINE}
        if engine := settings.get("engine_args"):
            settings["engine_args"] = without_memory(engine)
        return digest_json([settings, self.inputs])[:12]

    def seconds(self, here: Path) -> float | None:
        """What it took; None if it is not finished, or its results were changed since."""
        try:
            done = read_json(here / DONE)
            outputs = {name: digest(here / name) for name in self.outputs}
            return float(done["seconds"]) if done["outputs"] == outputs else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Finished:
    """A stage that has been run, now or before."""

    folder: Path
    command: str
    seconds: float


class WorkFolder(Run):
    """The folder of all stages, locked; use it as a context manager."""

    def __init__(self, folder: Path, count: int, progress: Progress):
        """Take or make the folder; ``count`` stages will be run."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, {}, of=folder)
        self.count, self.progress = count, progress
        self.finished: dict[str, Finished] = {}  # by the stages' names

    def run(self, stage: Stage) -> Path:
        """Bring a stage to its end, unless it is there already; returns its folder.

        Raises StageFailed: the job failed; what it left stays for the next attempt.
        """
        here = self.folder / f"{stage.name}-{stage.key}"
        options = stage.options(here)
        words: list[str] = []
        if stage.command and isinstance(options, Options):
            words = ["vllm-medusa", stage.command, *command_line(options)]
        command = shlex.join(words) or stage.what
        head = f"{len(self.finished) + 1}/{self.count} {stage.name}"
        seconds = stage.seconds(here)
        if seconds is not None:
            self.progress.note(f"{head}: done before ({duration(seconds)})")
        else:
            self.progress.note(f"{head}: {command}")
            seconds = self._attempt(stage, here, options, words)
        self.finished[stage.name] = Finished(here, command, seconds)
        return here

    def _attempt(self, stage: Stage, here: Path, options: Any, words: list[str]) -> float:
        """Run the job and note that it is finished; returns the seconds that it took."""
        start = time.monotonic()
        more = {"command": words} if words else {}
        try:
            here.mkdir(exist_ok=True)
            stage.prepare(here)
            run_in_process(_run, (stage.job, options), self.progress, log=here / LOG, **more)
            if missing := [name for name in stage.outputs if not (here / name).is_file()]:
                raise JobFailed(f"it left no {missing[0]}")
        except (ValueError, OSError, JobFailed) as error:
            failure = StageFailed(
                f"{stage.name}: {error}\nIts log is {here / LOG}. Once the cause is removed, "
                "the same command resumes from there."
            )
            failure.status = error.status if isinstance(error, JobFailed) else 2
            raise failure from None
        seconds = time.monotonic() - start
        outputs = {name: digest(here / name) for name in stage.outputs}
        done = {"command": words, "inputs": dict(stage.inputs), "outputs": outputs}
        write_json(here / DONE, done | {"seconds": round(seconds, 1)})
        return seconds


def _run(asked: tuple[Callable[..., Any], Any], progress: Progress, **more: Any) -> None:
    """Run a job in its process; the result stays there: what it leaves is in the folder."""
    job, options = asked
    if isinstance(options, dict):
        job(**options, progress=progress)
    else:
        job(options, progress, **more)
