"""A JSON-lines file of results that survives being killed at any moment.

Invariants, which make resuming safe:

1. Next to ``results.jsonl`` stands ``results.jsonl.manifest.json`` with the settings and the digest
   of the prompts. It is complete before the first result is written (written aside, then renamed).
2. A result is one line, written whole and flushed, after everything it reports is finished.
3. Only the last line can be torn (no newline at its end); opening the file cuts it off.
4. Whoever writes holds a lock on the file.

So the finished prompts are those whose ``index`` stands on a whole line; the rest is to be done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_medusa.files import (
    FileRefused,
    ends_of,
    read_json,
    refuse_other_settings,
    require_parent,
    try_lock,
    write_json,
)
from vllm_medusa.offline.engine import without_memory

MANIFEST_VERSION = 2
_CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".pt", ".json")


def fingerprint(checkpoint: Path) -> str:
    """Return a digest that tells two checkpoints (folder or file) apart without reading gigabytes.

    It covers names, sizes and both ends of every file. A safetensors file begins with its header
    and ends with weights, so a retrained model is told from its forerunner.
    """
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file() and path.suffix in _CHECKPOINT_SUFFIXES:
            digest.update(ends_of(path))
    return digest.hexdigest()


def manifest_path(output: Path) -> Path:
    """Return where the manifest of a result file stands."""
    return output.with_name(output.name + ".manifest.json")


class ResultLog:
    """The result file of one job, open for appending.

    ``done`` holds the indices of the prompts that have a result, ``failed`` of which are an
    "error"; ``torn_bytes`` says how much of an unfinished last line was cut off when the file was
    opened.
    """

    def __init__(
        self,
        path: Path,  # the result file; its folder must exist
        settings: Mapping[str, Any],  # everything that the results depend on, plain JSON
        *,
        overwrite: bool = False,  # throw away what the file holds; only a file of results is
        provenance: Mapping[str, Any] | None = None,  # noted when the file is begun
    ):
        """Open or create a result file.

        Results of other settings are never mixed into one file; nothing depends on provenance.

        Raises:
            FileRefused: the file belongs to other settings, is damaged, was not written by this
                class, or is being written by another process.

        """
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.done: set[int] = set()
        self.failed = 0
        self.torn_bytes = 0
        require_parent(path)
        if path.exists() and not path.is_file():
            raise FileRefused(f"{path}: not a regular file, so it can't be resumed. Name another.")
        self._begun = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if not try_lock(self._fd) or not self._in_place():
                self._begun = False  # by another
                raise FileRefused(
                    f"{path}: another process is writing it. Wait for that one to end, or name "
                    "another output."
                )
            self._require_own()
            if overwrite:
                os.ftruncate(self._fd, 0)
            if os.fstat(self._fd).st_size == 0:
                content: dict[str, Any] = {"version": MANIFEST_VERSION, "settings": self.settings}
                if provenance is not None:
                    content["provenance"] = provenance
                write_json(manifest_path(path), content)
            else:
                self._check_manifest()
                self._recover()
        except BaseException:
            self._remove_if_empty()
            os.close(self._fd)
            raise

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._remove_if_empty()
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one finished result; ``record["index"]`` is its prompt's index."""
        index = record["index"]
        if index in self.done:
            raise FileRefused(f"{self.path}: prompt {index} has a result already.")
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}. {len(self.done)} finished prompts are kept: make room, and the "
                "same command goes on",
                str(self.path),
            ) from None
        self.done.add(index)
        self.failed += "error" in record

    def close(self) -> None:
        """Push the results to the disk and release the file."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _in_place(self) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _remove_if_empty(self) -> None:
        """A job that broke off before its first result leaves nothing that it began."""
        if self._begun and os.fstat(self._fd).st_size == 0:
            manifest_path(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def _require_own(self) -> None:
        """Never touch what is not a file of results, such as the prompts themselves."""
        if os.fstat(self._fd).st_size and not manifest_path(self.path).exists():
            raise FileRefused(
                f"{self.path} holds something that was not written by this command (there is no "
                f"{manifest_path(self.path).name}). Name another output, or remove it yourself."
            )

    def _check_manifest(self) -> None:
        target = manifest_path(self.path)
        remedy = "Name another output, or pass --overwrite to throw these results away."
        try:
            manifest = read_json(target)
            version, before = manifest["version"], manifest["settings"]
        except (ValueError, KeyError, TypeError):
            raise FileRefused(f"{target}: not a manifest of results. {remedy}") from None
        if version != MANIFEST_VERSION:
            raise FileRefused(
                f"{target}: version {version!r}; this release reads {MANIFEST_VERSION}. {remedy}"
            )
        before, now = _without_places(before), _without_places(self.settings)
        refuse_other_settings(self.path, before, now, "results", remedy)

    def _recover(self) -> None:
        """Collect the finished indices and cut off a torn last line."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.torn_bytes = len(line)
                    break
                try:
                    record = json.loads(line)
                    self.done.add(int(record["index"]))
                    self.failed += "error" in record
                except (ValueError, KeyError, TypeError):
                    raise FileRefused(
                        f"{self.path}: line {number} is not a result, so the file was changed by "
                        "something else. Remove that line to have its prompt done again, or pass "
                        "--overwrite."
                    ) from None
                end += len(line)
        if self.torn_bytes:
            os.ftruncate(self._fd, end)


def _without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which checkpoints on this machine are known by their digests, not their paths.

    Where a checkpoint stands, how its path is spelled, and how much memory an engine got is nothing
    that results depend on.
    """
    known, engine = settings.get("checkpoints"), settings.get("engine")
    if not isinstance(known, Mapping) or not isinstance(engine, Mapping):
        return dict(settings)
    speculation = engine.get("speculative_config") or {}
    digests = {
        "model": known.get(engine.get("model")),
        "speculative_model": known.get(speculation.get("model")),
    }
    engine = {**engine, "engine_args": without_memory(engine.get("engine_args") or {})}
    if digests["model"] is not None:
        engine["model"] = None
    if digests["speculative_model"] is not None:
        engine["speculative_config"] = {**speculation, "model": None}
    return {**settings, "engine": engine, "checkpoints": digests}
