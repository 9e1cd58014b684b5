"""A JSON-lines file of results that can be resumed after a kill at any time.

The settings are in ``NAME.run/`` next to it, a `vllm_medusa.files.Run`. A result is one line,
written and flushed as a whole, after everything it reports is finished. Only the last line can be
incomplete; opening the file removes it. Finished prompts are those whose ``index`` is on a
complete line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_medusa.files import FileRefused, Run, require_parent


class ResultLog:
    """The results file of one job, open for appending; use it as a context manager.

    Attributes:
        done: indices of the prompts that have a result.
        failed: number of results with an "error".
        torn_bytes: bytes of an incomplete last line, which was removed.

    """

    def __init__(
        self,
        path: Path,  # its folder must exist
        settings: Mapping[str, Any],  # everything that the results depend on, plain JSON
        *,
        overwrite: bool = False,  # discard the contents of a results file
        provenance: Mapping[str, Any] | None = None,
    ):
        """Open or create a results file; results of different settings are never mixed.

        Raises FileRefused: the file belongs to other settings, is damaged, was not written by this
        class, or is being written by another process.
        """
        self.path = path
        self.done: set[int] = set()
        self.failed = self.torn_bytes = 0
        require_parent(path)
        if path.exists() and not path.is_file():
            raise FileRefused(f"{path}: not a regular file, so it can't be resumed. Use another.")
        folder = path.with_name(f"{path.name}.run")
        if path.exists() and path.stat().st_size and not (folder / "run.json").exists():
            raise FileRefused(
                f"{path} was not written by this command (there is no "
                f"{folder.name}). Choose another output, or remove it yourself."
            )
        self._begun = not path.exists()
        overwrite = overwrite or self._begun or not path.stat().st_size
        how: dict[str, Any] = {"overwrite": overwrite, "clear": path, "provenance": provenance}
        self._run = Run(folder, settings, of=path, **how)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._begun and not os.fstat(self._fd).st_size:
            self.path.unlink()  # the job failed before its first result
            self._run.remove()
        self.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one finished result; ``record["index"]`` is its prompt's index."""
        index = record["index"]
        if index in self.done:
            raise FileRefused(f"{self.path}: prompt {index} already has a result.")
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}. {len(self.done)} finished prompts are kept. Free space; the "
                "same command resumes",
                str(self.path),
            ) from None
        self.done.add(index)
        self.failed += "error" in record

    def close(self) -> None:
        """Sync the results to disk and release the file."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._run.close()

    def _recover(self) -> None:
        """Collect the finished indices and remove an incomplete last line."""
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
                        f"{self.path}: line {number} is not a result, so the file was modified by "
                        "another program. Remove that line to run its prompt again, or pass "
                        "--overwrite."
                    ) from None
                end += len(line)
        if self.torn_bytes:
            os.ftruncate(self._fd, end)
