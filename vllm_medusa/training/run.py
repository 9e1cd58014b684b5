"""The folder of a training run, which resumes exactly where it was killed.

Under the heads' own folder stands ``training/``::

    log.jsonl        a line for each step and each measurement
    curves.png       the same as a picture, drawn at the end
    run.json         everything the result depends on; other settings are refused
    work/*.pt        checkpoints; work/ is removed when the run is complete

A checkpoint is written aside, synced and renamed, after the log up to its step was synced, so there
is never one cut short. It holds the log's length then; what follows is cut off on resume. The run
is complete when the heads' ``config.json``, written last, is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.files import (
    FileRefused,
    new_file,
    read_json,
    refuse_other_settings,
    require_parent,
    try_lock,
    write_json,
)

_REMEDY = "Name another folder, or pass --overwrite to throw that run away."


class Run:
    """The output folder of one training, locked; a context manager.

    Attributes:
        output: where the heads go.
        folder: ``training/`` in it.
        work: ``training/work``, removed by `finish`.
        complete: a run of the same settings has ended here; there is nothing to do.

    """

    def __init__(
        self,
        output: Path,  # its parent must exist
        settings: Mapping[str, Any],  # plain JSON, everything that the result depends on
        *,
        overwrite: bool = False,  # remove the run that is there
        main: bool = True,  # False in the other processes of a distributed run, which only read
    ) -> None:
        """Open or create the folder.

        Raises:
            FileRefused: the folder holds something else, belongs to other settings, or is in use.

        """
        self.output, self.main = Path(output), main
        self.folder, self.work = self.output / "training", self.output / "training" / "work"
        self.settings = json.loads(json.dumps(settings))
        self.complete = not overwrite and (self.output / "config.json").exists()
        self._lock = -1
        if not main:
            return
        check_output(self.output)
        self.output.mkdir(exist_ok=True)
        self._lock = os.open(self.output, os.O_RDONLY)
        try:
            if not try_lock(self._lock):
                raise FileRefused(
                    f"{self.output}: another process is training there. Wait for it, or name "
                    "another folder."
                )
            if self._settings_file.exists():
                if overwrite:
                    self._throw_away()
                else:
                    self._compare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Write the settings: from now on the folder belongs to them."""
        if self.main:
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(self._settings_file, self.settings)

    def finish(self) -> None:
        """Remove what only an unfinished run needs; the heads must be there."""
        assert (self.output / "config.json").exists(), "the heads have to be saved before"
        if self.main:
            shutil.rmtree(self.work, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the folder; the run can be resumed."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def _settings_file(self) -> Path:
        return self.folder / "run.json"

    def _compare(self) -> None:
        try:
            before = read_json(self._settings_file)
        except FileRefused as error:
            raise FileRefused(f"{error} {_REMEDY}") from None
        refuse_other_settings(self.output, before, self.settings, "a run", _REMEDY)

    def _throw_away(self) -> None:
        """Remove the run: checkpoints first and its settings last, so that none is continued."""
        shutil.rmtree(self.work, ignore_errors=True)
        for name in ("config.json", "model.safetensors", "calibration.safetensors"):
            (self.output / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self._settings_file:
                path.unlink()
        self._settings_file.unlink()


class Stage:
    """Log and checkpoint of one stage of a run; `load` comes first."""

    def __init__(self, run: Run, log: str = "log.jsonl", name: str = "state") -> None:
        self.main, self.folder = run.main, run.folder
        self._log, self._checkpoint = run.folder / log, run.work / f"{name}.pt"
        self._file: FileIO | None = None

    def load(self, map_location: Any = "cpu") -> dict[str, Any] | None:
        """Return the last checkpoint, or None; cuts the log back to it."""
        kept = None
        if self._checkpoint.exists():
            kept = torch.load(self._checkpoint, map_location=map_location, weights_only=True)
        if self.main:
            self._log.touch()
            self._file = self._log.open("r+b", buffering=0)  # readers see every line at once
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
        """Every line of the log so far."""
        with self._log.open("rb") as file:
            yield from map(json.loads, file)


def check_output(output: Path) -> None:
    """Refuse a folder that no heads can be trained into, before anything is read.

    Raises:
        FileRefused: its parent is missing, it is a file, or it holds something other than a run.

    """
    require_parent(output)
    if output.exists() and not output.is_dir():
        raise FileRefused(f"{output} is a file; name a folder for the heads.")
    if (output / "training" / "run.json").is_file():
        return
    if {path.name for path in output.rglob("*")} - {"training", "work", ".run.json.part"}:
        raise FileRefused(
            f"{output} holds files, but is not a training run. Name another folder for the heads."
        )


def check_inputs(
    output: Path,
    inputs: Mapping[str, str | Path | None],  # by what users call each; hub names are ignored
    *,
    overwrite: bool,
    removed: Sequence[str],  # what a run replaces in the output
) -> None:
    """Refuse inputs that training into ``output`` would remove.

    Raises:
        FileRefused: one is the output or in it.

    """
    whole = output.resolve()
    taken = [whole] if overwrite else [whole / name for name in removed]
    for name, path in inputs.items():
        if path is None or not Path(path).exists():
            continue
        if any(Path(path).resolve().is_relative_to(folder) for folder in taken):
            what = "which --overwrite empties" if overwrite else "whose content the run replaces"
            raise FileRefused(
                f"{name} {path} is in the output {output}, {what}. Name another --output, or move "
                "it out of there."
            )
