"""Step costs on disk, so that a restarted server need not measure them again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.files import FileRefused, digest_json, read_json, write_json

_FORMAT = 5


class CostStore:
    """Storage for the step costs of one kind of engine."""

    def __init__(self, folder: Path, key: Mapping[str, str], max_rows: int) -> None:
        """Choose the file.

        Args:
            folder: folder of the cache; it need not exist.
            key: what costs depend on, such as model, device, dtype and versions.
            max_rows: max rows per step.

        """
        self.key, self.max_rows = dict(key), max_rows
        self.path = folder / f"step-cost-{digest_json(self.key)[:20]}.json"
        self._saved_at, self._saved_steps = time.perf_counter(), 0

    def load(self) -> tuple[StepCost, str]:
        """Return the stored costs and "", or new ones and the reason ("" if there is no file)."""
        new = StepCost(self.max_rows)
        try:
            if not self.path.exists():
                return new, ""
            document = read_json(self.path)
            if document.get("format") != _FORMAT or document.get("of") != self.key:
                return new, f"{self.path} is for another engine or version."
            cost = StepCost.from_dict(document)
        except (OSError, ValueError, RecursionError) as error:
            return new, f"{self.path} can't be used: {error}"
        if cost.max_rows != self.max_rows:
            return new, f"{self.path} is for steps of {cost.max_rows} rows."
        self._saved_steps = cost.steps
        return cost, ""

    def save(self, cost: StepCost, min_steps: int = 1, min_seconds: float = 0.0) -> str:
        """Write costs if they changed; return why they can't be written, or "".

        Args:
            cost: the costs to write.
            min_steps: min steps since the last write; after fewer, nothing is written.
            min_seconds: the same for time.

        """
        now = time.perf_counter()
        if cost.steps - self._saved_steps < min_steps or now - self._saved_at < min_seconds:
            return ""
        self._saved_at, self._saved_steps = now, cost.steps
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            document = {"format": _FORMAT, "of": self.key} | cost.to_dict()
            write_json(self.path, document, f"{os.getpid()}.part")
        except (OSError, FileRefused) as error:
            return f"{self.path} can't be written: {error}"
        return ""
