"""The folder of a training run, which resumes exactly where it was killed.

The heads' folder contains ``training/``::

    log.jsonl        one line per step and per measurement
    curves.png       a plot of the log, drawn at the end
    run.json         everything that the result depends on; other settings are refused
    work/*.pt        checkpoints; work/ is removed when the run is complete

A checkpoint is written to a temporary file, synced and renamed, after the log was synced up to its
step, so it is always complete. It stores the log's length; later lines are removed on resume. A run
is complete when the heads' ``config.json``, written last, exists.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.files import FileRefused, Run, new_file, require_output


class TrainingRun(Run):
    """The output folder of one training, locked; a context manager.

    Attributes:
        output: folder for the heads.
        folder: ``training/`` in it.
        work: ``training/work``, created with the first result, removed at the end.
        complete: a run with the same settings has finished here; nothing to do.

    """

    def __init__(
        self,
        output: Path,  # its parent must exist
        settings: Mapping[str, Any],  # plain JSON, everything that the result depends on
        *,
        overwrite: bool = False,  # remove an existing run
        main: bool = True,  # False in other processes of a distributed run, which only read
    ) -> None:
        """Open or create the folder.

        Raises FileRefused: the folder has other contents or settings, or is in use.
        """
        self.output, self.main = Path(output), main
        self.folder, self.work = self.output / "training", self.output / "training" / "work"
        self.complete = not overwrite and (self.output / "config.json").exists()
        if main:
            check_output(self.output)
            self.output.mkdir(exist_ok=True)
            remedy = "Choose another folder, or pass --overwrite to discard that run."
            options: dict[str, Any] = {"of": self.output, "overwrite": overwrite, "remedy": remedy}
            super().__init__(self.folder, settings, **options)
            for name in ("config.json", "model.safetensors", "calibration.safetensors"):
                if overwrite:
                    (self.output / name).unlink(missing_ok=True)

    def __exit__(self, *error: object) -> None:
        """Release the folder; if the run is complete, remove what only an unfinished run needs."""
        if not self.main:
            return
        if (self.output / "config.json").exists():
            shutil.rmtree(self.work, ignore_errors=True)
            (self.folder / "lock").unlink(missing_ok=True)
        elif error[0] is not None and not self.resumed and not self.work.exists():
            self.remove()  # nothing was computed, so other settings are allowed
        self.close()


class Stage:
    """Log and checkpoint of one stage of a run; call `load` first."""

    def __init__(self, run: TrainingRun, log: str = "log.jsonl", name: str = "state") -> None:
        self.main = run.main
        self._log, self._checkpoint = run.folder / log, run.work / f"{name}.pt"
        self._file: FileIO | None = None

    def load(self, map_location: Any = "cpu") -> dict[str, Any] | None:
        """Return the last checkpoint, or None; truncates the log to it."""
        kept = None
        if self._checkpoint.exists():
            kept = torch.load(self._checkpoint, map_location=map_location, weights_only=True)
            size = self._log.stat().st_size if self._log.exists() else 0
            if size < kept["log_bytes"]:  # killed while --overwrite removed the run
                kept = None
        if self.main:
            self._log.touch()
            self._file = self._log.open("r+b", buffering=0)  # readers see every line immediately
            size = 0 if kept is None else kept["log_bytes"]
            self._file.truncate(size)
            self._file.seek(size)
        return None if kept is None else kept["state"]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of tensors, numbers and texts."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            with new_file(self._checkpoint, "wb") as file:
                torch.save({"state": dict(state), "log_bytes": self._file.tell()}, file)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        if self._file is not None:
            self._file.write((json.dumps(entry) + "\n").encode())

    def entries(self) -> Iterator[dict[str, Any]]:
        """All lines of the log so far."""
        with self._log.open("rb") as file:
            yield from map(json.loads, file)


def check_output(output: Path, inputs: Mapping[str, str | Path | None] | None = None) -> None:
    """Refuse a folder that can't be an output, before anything is read.

    Raises FileRefused: see `require_output`; or it has contents other than a run.
    """
    require_output(output, inputs or {})
    if (output / "training" / "run.json").is_file():
        return
    if {path.name for path in output.rglob("*")} - {"training", "lock", ".run.json.part"}:
        raise FileRefused(
            f"{output} holds files, but is not a training run. Choose another folder for the heads."
        )
