"""Resumable stages, run one after another.

Each stage has its own folder, named by a digest of its options and of the stage before: if options
change, that stage and later ones use new folders, and nothing is deleted. A stage is finished when
``done.json``, written last, exists and matches its outputs. An unfinished folder is passed to the
same job again, which resumes in it.
"""

from __future__ import annotations

import shlex
import shutil
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
MACHINE = {"batch"}  # tokens do not depend on it, as on the engine's `MEMORY_OPTIONS`


@dataclass(frozen=True)
class Stage:
    """A job whose options may refer to the folders of earlier stages."""

    name: str
    text: str  # what it does
    job: Callable[..., Any]  # see `run_in_process`
    options: Callable[[Path], Options | dict[str, Any]]  # of the job, given the stage's folder
    outputs: Sequence[str] = ()  # files that later stages need from its folder
    changes: str = ""  # an earlier stage: every attempt starts from copies of its outputs


@dataclass(frozen=True)
class Finished:
    """A finished stage."""

    folder: Path
    command: str  # of `vllm-medusa`; the stage's text if it has no command
    seconds: float


class WorkFolder(Run):
    """The folder of all stages, locked; use it as a context manager."""

    def __init__(self, folder: Path, progress: Progress, inputs: Sequence[str] = ()):
        """Open or create the folder, with the digests of the stages' ``inputs``."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, {}, of=folder)
        self.progress = progress
        self.before = digest_json(list(inputs))  # what the next stage depends on
        self.finished: dict[str, Finished] = {}  # by stage name

    def at(self, name: str) -> Path:
        """The folder of a finished stage."""
        return self.finished[name].folder

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all stages that are not finished.

        Raises JobFailed: a job failed, or refused its input (status 2); its files are kept for
        the next attempt.
        """
        for number, stage in enumerate(stages, 1):
            self._run(stage, f"{number}/{len(stages)} {stage.name}")

    def _run(self, stage: Stage, title: str) -> None:
        here = self.folder / f"{stage.name}-{_key(stage.options(Path()), self.before)}"
        options, command = stage.options(here), list[str]()
        if isinstance(options, Options):
            command = ["vllm-medusa", stage.name, *command_line(options)]
        if (seconds := _done(here, stage.outputs)) is not None:
            self.progress.note(f"{title}: already done ({duration(seconds)})")
        else:
            self.progress.note(f"{title}: {stage.text}")
            start = time.monotonic()
            try:
                here.mkdir(exist_ok=True)
                for name in stage.outputs if stage.changes else ():
                    (here / name).parent.mkdir(exist_ok=True)
                    if (source := self.at(stage.changes) / name).is_file():
                        shutil.copyfile(source, here / name)
                run_in_process(stage.job, options, self.progress, log=here / LOG, command=command)
                if missing := [each for each in stage.outputs if not (here / each).is_file()]:
                    raise JobFailed(f"it did not write {missing[0]}")
            except (ValueError, OSError, JobFailed) as error:
                failure = JobFailed(
                    f"{stage.name}: {error}\nSee its log, {here / LOG}. Once the cause is fixed, "
                    "the same command resumes from this stage."
                )
                failure.status = error.status if isinstance(error, JobFailed) else 2
                raise failure from None
            seconds = round(time.monotonic() - start, 1)
            digests = {each: digest(here / each) for each in stage.outputs}
            write_json(here / DONE, {"command": command, "outputs": digests, "seconds": seconds})
        self.finished[stage.name] = Finished(here, shlex.join(command) or stage.text, seconds)
        if stage.outputs:
            self.before = here.name


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
