"""Predictions of the heads at every position that decoding could have reached.

Every generated span is a *text*. Head h (0-based) at position t predicts token t + h + 2, so the
positions of a span [s, e) start at s - 1, whose next token is the span's first. They end where the
last head has its last label. If the span ends with an end token, nothing follows that a head could
predict, so its positions continue to e - 3, where head 0 has its last label.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.files import new_path
from vllm_medusa.heads.eagle_checkpoint import drafter_method

FILE = "calibration.safetensors"  # next to the heads
NO_LABEL = -1  # rank of a token beyond the end of the text
MISSED = 32767  # rank of a token outside the heads' vocabulary
EAGLE = (
    "{0} is an EAGLE drafter, which builds a new tree in each step: it has no tree and is "
    "not calibrated. Serve it directly (serve TARGET --speculative-model {0}), or measure its "
    "speed: compare TARGET {0} --prompts FILE."
)


@dataclass(frozen=True)
class Observations:
    """Positions of all texts, concatenated; N positions, S texts, K heads."""

    ranks: npt.NDArray[np.int16]  # [N, K] of the actual token; `NO_LABEL`, `MISSED`
    offsets: npt.NDArray[np.int64]  # [S + 1] first position of each text, and N
    temperatures: npt.NDArray[np.float32]  # [S] sampling temperature; NaN: not by the target
    prompts: npt.NDArray[np.int64]  # [S] prompt number, shared by samples of one prompt
    num_ranks: int  # R: choices of each head that a tree may use
    source: dict[str, Any] = field(default_factory=dict)  # how it was made, as plain JSON

    @property
    def num_heads(self) -> int:
        """K."""
        return self.ranks.shape[1]

    @property
    def num_texts(self) -> int:
        """S."""
        return len(self.temperatures)

    def texts(self, chosen: Sequence[int] | None = None) -> list[npt.NDArray[np.int16]]:
        """The ranks [T, K] of each chosen text, or of all."""
        wanted = range(self.num_texts) if chosen is None else chosen
        return [self.ranks[self.offsets[text] : self.offsets[text + 1]] for text in wanted]

    def halves(self) -> tuple[list[int], list[int]] | None:
        """Split the texts by prompts into two halves, every second prompt; None for one prompt."""
        first = np.flatnonzero(self.prompts % 2 == 0).tolist()
        second = np.flatnonzero(self.prompts % 2 == 1).tolist()
        return (first, second) if first and second else None

    def temperature(self) -> float | None:
        """The temperature of most positions; None if the target generated too little text."""
        lengths = np.diff(self.offsets)
        known = ~np.isnan(self.temperatures)
        if 2 * lengths[known].sum() < lengths.sum():
            return None
        values, group = np.unique(self.temperatures[known], return_inverse=True)
        return round(float(values[np.bincount(group, lengths[known]).argmax()]), 6)

    def save(self, folder: Path) -> None:
        """Write `FILE` into the heads' folder atomically."""
        arrays = dict(vars(self))
        notes = {name: json.dumps(arrays.pop(name)) for name in ("num_ranks", "source")}
        with new_path(folder / FILE) as part:  # a transposed array would be in memory order
            save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, part, notes)

    @classmethod
    def load(cls, folder: Path) -> Observations:
        """Read what `save` wrote.

        Raises CalibrationError: there is no calibration, or it is unreadable.
        """
        path = folder / FILE
        if not path.is_file():
            if drafter_method(folder) is not None:
                raise CalibrationError(EAGLE.format(folder))
            raise CalibrationError(
                f"{folder} holds no {FILE}: run `vllm-medusa calibrate TARGET {folder} --data "
                "RECORDS` first."
            )
        try:
            with safe_open(path, framework="np") as file:
                notes = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(**arrays, **notes)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise CalibrationError(f"{path} can't be read ({error}): calibrate again.") from error
