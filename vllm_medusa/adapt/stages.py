"""Resumable stages, run one after another.

Each stage has its own folder, named by a digest of its options and of the stage before: other
options use other folders from there on, and nothing is deleted. A stage is finished when
``done.json``, written last, exists and matches its outputs. An unfinished folder is passed to the
same job again, which resumes in it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.files import Run, digest, digest_json, read_json, write_json
from vllm_medusa.job import JobFailed, Progress, duration
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.engine import without_memory
from vllm_medusa.options import Options, command_line, values_of

DONE, LOG = "done.json", "log.txt"
# Paths are ignored: their contents follow from earlier stages.
PLACES = {"model", "target", "heads", "prompts", "data", "heldout", "output"}
MACHINE = {"batch"}  # depends on the available memory, as the engine's `MEMORY_OPTIONS` do


@dataclass(frozen=True)
class Finished:
    """A finished stage."""

    folder: Path
    command: str  # of `vllm-medusa`, or a description
    seconds: float


class WorkFolder(Run):
    """The folder of all stages, locked; use it as a context manager."""

    def __init__(self, folder: Path, count: int, progress: Progress, inputs: Sequence[str] = ()):
        """Open or create the folder of ``count`` stages, with the digests of their ``inputs``."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, {}, of=folder)
        self.count, self.progress = count, progress
        self.before = digest_json(list(inputs))  # what the next stage depends on
        self.finished: dict[str, Finished] = {}  # by stage name

    def run(
        self,
        name: str,
        job: Callable[..., Any],  # see `run_in_process`
        options: Callable[[Path], Options | dict[str, Any]],  # of the job, given the stage's folder
        outputs: Sequence[str] = (),  # files that later stages need from its folder
        command: str = "",  # a description, if not a `vllm-medusa` command
        prepare: Callable[[Path], None] = lambda here: None,  # before every attempt
    ) -> Path:
        """Run a stage unless it is finished; returns its folder.

        Raises JobFailed: the job failed, or refused its input (status 2); its files are kept for
        the next attempt.
        """
        here = self.folder / f"{name}-{_key(options(Path()), self.before)}"
        arguments, words = options(here), list[str]()
        if isinstance(arguments, Options):
            words = ["vllm-medusa", name, *command_line(arguments)]
            command = shlex.join(words)
        head = f"{len(self.finished) + 1}/{self.count} {name}"
        if (seconds := _done(here, outputs)) is not None:
            self.progress.note(f"{head}: already done ({duration(seconds)})")
        else:
            self.progress.note(f"{head}: {command}")
            start = time.monotonic()
            try:
                here.mkdir(exist_ok=True)
                prepare(here)
                run_in_process(job, arguments, self.progress, log=here / LOG, command=words)
                if missing := [each for each in outputs if not (here / each).is_file()]:
                    raise JobFailed(f"it did not write {missing[0]}")
            except (ValueError, OSError, JobFailed) as error:
                failure = JobFailed(
                    f"{name}: {error}\nSee its log, {here / LOG}. Once the cause is fixed, the "
                    "same command resumes from this stage."
                )
                failure.status = error.status if isinstance(error, JobFailed) else 2
                raise failure from None
            seconds = round(time.monotonic() - start, 1)
            noted = {each: digest(here / each) for each in outputs}
            write_json(here / DONE, {"command": words, "outputs": noted, "seconds": seconds})
        self.finished[name] = Finished(here, command, seconds)
        if outputs:
            self.before = here.name
        return here


def _key(options: Options | dict[str, Any], before: str) -> str:
    """The digest in a folder's name, independent of paths."""
    values = options if isinstance(options, dict) else values_of(options)
    settings = {name: value for name, value in values.items() if name not in PLACES | MACHINE}
    if engine := settings.get("engine_args"):
        settings["engine_args"] = without_memory(engine)
    return digest_json([settings, before])[:12]


def _done(here: Path, outputs: Sequence[str]) -> float | None:
    """Duration of a stage in seconds; None: not finished, or its results were modified."""
    try:
        done = read_json(here / DONE)
        same = done["outputs"] == {name: digest(here / name) for name in outputs}
        return float(done["seconds"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
