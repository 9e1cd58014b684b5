"""The folder of a training run, which goes on exactly where it was killed.

Under the heads' own folder stands ``training/``::

    log.jsonl        one line for each step and each measurement
    curves.png       the same as a picture, drawn at the end
    run.json         everything the result depends on: another run is never continued
    work/state.pt    heads, optimiser, step; work/ goes when the run is complete
    work/lock        held by the process that trains

Invariants: ``run.json`` is written first. A state is written aside, synced and renamed, after the
log up to its step was synced; it says how long the log was then, and what lies behind is cut off
when the run goes on. So state and log always tell of the same steps. The run is complete when the
heads' ``config.json``, the last of all files, is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Any

import torch

from vllm_medusa.files import (
    FileRefused,
    new_file,
    read_json,
    refuse_other_settings,
    require_parent,
    take_lock,
    write_json,
)

_REMEDY = "Name another folder, or pass --overwrite to throw that run away."


class TrainingRun:
    """One run's folder, locked; use it as a context manager.

    Attributes:
        output: where the heads go.
        folder: ``training/`` in it.
        work: ``training/work``, removed by `finish`.
        complete: a run of the same settings has ended here; there is nothing to do.

    """

    def __init__(
        self,
        output: Path,  # the heads' folder; its parent must exist
        settings: Mapping[str, Any],  # plain JSON, everything that the result depends on
        *,
        overwrite: bool = False,  # throw away heads and runs that this class put there
        main: bool = True,  # False in the other processes of a distributed run, which only read
    ) -> None:
        """Open or create the folder of a run.

        Raises:
            FileRefused: the folder holds something else, belongs to other settings, or is in use.

        """
        self.output, self.main = Path(output), main
        self.folder = self.output / "training"
        self.work = self.folder / "work"
        self.settings = json.loads(json.dumps(settings))
        self._lock: IO[bytes] | None = None
        self._log: FileIO | None = None
        if main:  # the others would look while the main process makes the folder
            check_output(self.output)
        known = self._settings_file.exists()
        self.complete = not overwrite and (self.output / "config.json").exists()
        if not main:
            return
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(
            self.work / "lock",
            f"{self.output}: another process is training there. Wait for it, or name another "
            "folder.",
        )
        try:
            begun = known and not _just_begun(self.output)
            if known and overwrite:
                self._throw_away()
            elif begun:
                try:
                    before = read_json(self._settings_file)
                except FileRefused as error:
                    raise FileRefused(f"{error} {_REMEDY}") from None
                refuse_other_settings(self.output, before, self.settings, "a run", _REMEDY)
            if overwrite or not begun:
                write_json(self._settings_file, self.settings)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, map_location: Any = "cpu") -> dict[str, Any] | None:
        """Return the last state, or None; cuts the log back to it."""
        path = self.work / "state.pt"
        state = None
        if path.exists():
            state = torch.load(path, map_location=map_location, weights_only=True)
        if self.main:
            size = 0 if state is None else state["log_bytes"]
            log = self.folder / "log.jsonl"
            log.touch()
            self._log = log.open("r+b", buffering=0)  # whoever follows the run sees every line
            self._log.truncate(size)
            self._log.seek(size)
        return None if state is None else state["state"]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a state of tensors, numbers and texts; call `load` before."""
        if not self.main:
            return
        assert self._log is not None, "load() opens the log"
        os.fsync(self._log.fileno())
        with new_file(self.work / "state.pt", "wb") as file:
            torch.save({"state": dict(state), "log_bytes": self._log.tell()}, file)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the log; call `load` before."""
        if self.main:
            assert self._log is not None, "load() opens the log"
            self._log.write((json.dumps(entry) + "\n").encode())

    def entries(self) -> Iterator[dict[str, Any]]:
        """Every line of the log so far."""
        with (self.folder / "log.jsonl").open("rb") as file:
            for line in file:
                yield json.loads(line)

    def finish(self) -> None:
        """Remove what only an unfinished run needs; the heads must be there."""
        assert (self.output / "config.json").exists(), "the heads have to be saved before"
        self.close()
        if self.main:
            shutil.rmtree(self.work, ignore_errors=True)

    def close(self) -> None:
        """Release the folder; the run can be continued."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self.complete and self.main:
            shutil.rmtree(self.work, ignore_errors=True)  # only the lock was there

    @property
    def _settings_file(self) -> Path:
        return self.folder / "run.json"

    def _throw_away(self) -> None:
        """Remove the run, what it would go on from first; `run.json` stays until it is replaced.

        So a run that is killed here can only be begun anew: as it was, or by overwriting again.
        """
        for state in (self.work / "state.pt", *self.work.glob("*/training/work/state.pt")):
            state.unlink(missing_ok=True)
        for name in ("config.json", "model.safetensors", "calibration.safetensors"):
            (self.output / name).unlink(missing_ok=True)
        for path in [*self.folder.iterdir(), *self.work.iterdir()]:
            if path.is_dir() and path != self.work:
                shutil.rmtree(path)
            elif path.is_file() and path.name not in ("lock", self._settings_file.name):
                path.unlink()


def check_output(output: Path) -> None:
    """Refuse a folder that no heads can be trained into, before anything is read.

    Raises:
        FileRefused: its parent is missing, it is a file, or it holds something else than a run.

    """
    require_parent(output)
    if output.exists() and not output.is_dir():
        raise FileRefused(f"{output} is a file; name a folder for the heads.")
    known = (output / "training" / "run.json").is_file() or _just_begun(output)
    if not known and output.exists() and any(output.iterdir()):
        raise FileRefused(
            f"{output} holds files, but is not a training run. Name another folder for the heads."
        )


def check_inputs(
    output: Path,
    inputs: Mapping[str, str | Path | None],  # by what users call each; hub names are left alone
    *,
    overwrite: bool = False,  # what the output holds is thrown away
    removed: Sequence[str] = ("training",),  # in the output, and never the user's
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
        place = Path(path).resolve()
        if any(place.is_relative_to(folder) for folder in taken):
            what = "which --overwrite empties" if overwrite else "whose content the run replaces"
            raise FileRefused(
                f"{name} {path} is in the output {output}, {what}. Name another --output, or move "
                "it out of there."
            )


def _just_begun(output: Path) -> bool:
    """Whether the folder holds no more than a run that ended before anything was computed."""
    inside = {"training", "training/work", "training/work/lock", "training/run.json"}
    inside |= {"training/.run.json.part", "training/run.json.part"}  # its name until 0.1
    return {path.relative_to(output).as_posix() for path in output.rglob("*")} <= inside
