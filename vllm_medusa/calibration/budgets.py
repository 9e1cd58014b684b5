"""What trees of all sizes are worth: by both estimates, on the texts they were built from and not.

A tree chosen for some texts looks better on them than it is. So besides the tree that is built from
all texts, every size is built from one half of the prompts and walked on the other, both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.accuracy import accuracy_table
from vllm_medusa.calibration.independence import independent_tau, independent_tree
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.options import Algorithm
from vllm_medusa.calibration.search import walk_taus, walked_tree
from vllm_medusa.calibration.walks import Ranks
from vllm_medusa.files import read_json
from vllm_medusa.tree.topology import Path as TreePath

ALGORITHMS = get_args(Algorithm)


@dataclass(frozen=True)
class Limits:
    """What a tree may use."""

    num_draft_tokens: int
    max_rank: int  # choices of a head: 0 to max_rank - 1
    max_depth: int | None = None


@dataclass(frozen=True)
class Curve:
    """Tokens per step with the first n nodes of a tree, for some sizes n.

    ``walked`` is by walking the texts it was built from, ``independent`` the paper's estimate from
    the same texts, ``heldout`` by walking texts of other prompts (None: there are none) with the
    tree of the same size that was built without them.
    """

    algorithm: str
    paths: list[TreePath]  # best first
    sizes: list[int]
    walked: list[float]
    independent: list[float]
    heldout: list[float | None]

    def expected(self) -> list[float]:
        """What other prompts are expected to give: held out, where anything could be."""
        both = zip(self.heldout, self.walked, strict=True)
        return [walked if heldout is None else heldout for heldout, walked in both]


def build_tree(algorithm: str, texts: Sequence[Ranks], limits: Limits) -> list[TreePath]:
    """The tree that an algorithm makes of texts, best first."""
    size, ranks, depth = limits.num_draft_tokens, limits.max_rank, limits.max_depth
    if algorithm == "walk":
        return walked_tree(texts, size, ranks, depth)
    return independent_tree(accuracy_table(np.concatenate(texts), ranks), size, depth)


def curve(
    observations: Observations, algorithm: str, limits: Limits, sizes: Sequence[int]
) -> Curve:
    """Build the tree, and say what each size is worth."""
    texts = observations.texts()
    paths = build_tree(algorithm, texts, limits)
    sizes = sorted({min(size, len(paths)) for size in sizes})
    table = accuracy_table(observations.ranks, limits.max_rank).astype(np.float64)
    heldout: list[float | None] = [None] * len(sizes)
    if halves := observations.halves():
        first, second = map(observations.texts, halves)
        there, back = (
            walk_taus(other, build_tree(algorithm, own, limits), sizes)
            for own, other in ((first, second), (second, first))
        )
        heldout = [(a + b) / 2 for a, b in zip(there, back, strict=True)]
    return Curve(
        algorithm,
        paths,
        sizes,
        walk_taus(texts, paths, sizes),
        [independent_tau(table, paths[:size]) for size in sizes],
        heldout,
    )


def usual_sizes(num_draft_tokens: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, then in larger strides up to the budget itself."""
    steps = (1, 2, 4, 8, 12, 16, 24, 32, 48, 63, *range(96, num_draft_tokens, 32))
    return [size for size in steps if size < num_draft_tokens] + [num_draft_tokens]


@dataclass(frozen=True)
class StepCost:
    """Measured time of a verification step by number of draft nodes, in any unit; 0: plain."""

    times: Mapping[int, float]

    @classmethod
    def load(cls, path: Path) -> StepCost:
        """Read a JSON file such as ``{"0": 9.1, "4": 10.2, "16": 14.0}``.

        Raises:
            CalibrationError: it isn't one, or lacks 0 or a second size.

        """
        try:
            times = {int(size): float(time) for size, time in read_json(path).items()}
        except (OSError, ValueError, TypeError) as error:
            raise CalibrationError(
                f"{path} can't be read as step costs ({error}); give JSON that maps draft nodes to "
                'the time of a step, such as {"0": 9.1, "4": 10.2, "16": 14.0}.'
            ) from None
        if (
            0 not in times
            or len(times) < 2
            or not all(0 < t < float("inf") for t in times.values())
        ):
            raise CalibrationError(
                f"{path} holds {times}; give times above 0 for 0 draft nodes (plain decoding) and "
                "at least one other size."
            )
        return cls(dict(sorted(times.items())))

    def at(self, size: int) -> float:
        """The time of a step of ``size`` draft nodes, straight lines between what was measured."""
        return float(np.interp(size, list(self.times), list(self.times.values())))

    def speedup(self, size: int, tau: float) -> float:
        """Tokens per time against plain decoding's."""
        return tau / self.at(size) * self.at(0)

    def best(self, sizes: Sequence[int], taus: Sequence[float]) -> tuple[int, float]:
        """The size that gives most, and how much; (0, 1.0) if none beats plain decoding.

        Sizes beyond what was measured are left out.
        """
        known = [
            (self.speedup(size, tau), -size)
            for size, tau in zip(sizes, taus, strict=True)
            if size <= max(self.times)
        ]
        gain, negative = max([(1.0, 0), *known])
        return -negative, gain
