"""Choose the best draft tree for calibrated heads, and write it into their config.

Estimates on the texts that a tree was built from are biased. So besides the tree from all texts,
one is built from each half of the prompts and walked on the other half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.calibrate import check_folder
from vllm_medusa.calibration.observations import FILE, Observations
from vllm_medusa.calibration.options import TreeOptions
from vllm_medusa.calibration.pictures import check_picture, draw_tree
from vllm_medusa.calibration.walks import Walks, walk_taus, walked_tree
from vllm_medusa.files import new_file, refuse_to_replace
from vllm_medusa.heads import update_config
from vllm_medusa.heads.files import digest_heads, find_checkpoint
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.tree import TreeError, read_tree
from vllm_medusa.tree.topology import Path as TreePath


@dataclass(frozen=True)
class Chosen:
    """A tree and its estimates.

    ``walked`` and ``heldout`` are tokens per step with the first 1, 2, .. nodes of the tree: on the
    texts that it was built from, and on other prompts with a tree of that size built without them.
    """

    observations: Observations  # the calibration that it is based on
    paths: list[TreePath]  # best first
    walked: list[float]
    heldout: list[float] | None  # None: all texts have one prompt
    standard_error: float  # of ``walked[-1]``, over prompts; NaN for one prompt
    chances: dict[TreePath, float]  # fraction of steps that accept each node, the root () included


def choose_tree(
    options: TreeOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Chosen:
    """Build the tree with the most tokens per step for calibrated heads, and save it.

    Raises ValueError: the heads have no valid calibration, or options do not match it.
    """
    if options.output:
        refuse_to_replace(options.output, "tree", _is_tree)
    if options.draw:
        check_picture(options.draw)
    observations = Observations.load(options.heads)
    _check(options, observations)
    progress.at("building trees", 0, 1)
    chosen = best_tree(observations, options.num_draft_tokens)
    progress.at("building trees", 1, 1)
    paths = chosen.paths
    if len(paths) < options.num_draft_tokens:
        progress.warn(
            f"{options.num_draft_tokens} nodes were requested; there are {len(paths)} of "
            f"{observations.num_heads} heads with {observations.num_ranks} choices each."
        )
    if options.draw:
        draw_tree(options.draw, paths, chosen.chances, _title(options.heads, chosen))
    heldout = chosen.heldout
    error = chosen.standard_error
    note = {
        "algorithm": "walk",
        "temperature": observations.temperature(),
        "positions": len(observations.ranks),
        "tokens_per_step": [round(tau, 4) for tau in chosen.walked],
        "standard_error": None if math.isnan(error) else round(error, 4),
        "tokens_per_step_heldout": heldout and [round(tau, 4) for tau in heldout],
    }
    tree = [list(path) for path in paths]
    if options.output:
        with new_file(options.output) as file:
            file.write(json.dumps({"tree": tree, "source": note}, allow_nan=False) + "\n")
    if not options.dry_run:
        update_config(
            options.heads,
            tree=tree,
            tree_tokens_per_step=note["tokens_per_step"],
            tree_source=note,
            provenance=provenance(command, [options.heads / FILE]),
        )
    return chosen


def best_tree(observations: Observations, size: int) -> Chosen:
    """The tree of up to ``size`` nodes, and the tokens per step of its prefixes."""
    texts, width = observations.texts(), observations.num_ranks
    paths = walked_tree(texts, size, width)
    sizes = range(1, len(paths) + 1)
    heldout = None
    if halves := observations.halves():
        first, second = map(observations.texts, halves)
        there, back = (
            walk_taus(other, walked_tree(own, size, width), sizes)
            for own, other in ((first, second), (second, first))
        )
        heldout = [(a + b) / 2 for a, b in zip(there, back, strict=True)]
    walks = Walks(texts, paths)
    visits = walks.visits()
    chances = {path: float(n / visits[0]) for path, n in zip(walks.paths, visits, strict=True)}
    return Chosen(
        observations,
        paths,
        walk_taus(texts, paths, sizes),
        heldout,
        _standard_error(observations, paths),
        chances,
    )


def origin(observations: Observations) -> str:
    """Describe the data of a calibration."""
    temperature = observations.temperature()
    wrote = "text of other origin" if temperature is None else f"T = {temperature:g}"
    return f"{len(observations.ranks)} positions, {wrote}"


def _standard_error(observations: Observations, paths: Sequence[TreePath]) -> float:
    """Standard error of tau over prompts (a ratio of sums); samples of a prompt are pooled."""
    accepted, steps = [], []
    for prompt in np.unique(observations.prompts):
        own = np.flatnonzero(observations.prompts == prompt).tolist()
        visits = Walks(observations.texts(own), paths).visits()
        accepted.append(int(visits[1:].sum()))
        steps.append(int(visits[0]))
    count, total = len(steps), sum(steps)
    if count < 2:
        return math.nan
    extra = sum(accepted) / total
    spread = sum((a - extra * n) ** 2 for a, n in zip(accepted, steps, strict=True))
    return math.sqrt(count / (count - 1) * spread) / total


def _check(options: TreeOptions, observations: Observations) -> None:
    if not options.dry_run:
        check_folder(options.heads)
    digest = observations.source.get("heads")
    if digest is not None and digest != digest_heads(find_checkpoint(options.heads)):
        raise CalibrationError(
            f"the heads in {options.heads} have changed since they were calibrated, so the "
            "calibration is outdated; run `vllm-medusa calibrate` again."
        )


def _title(heads: Path, chosen: Chosen) -> str:
    elsewhere = f" ({chosen.heldout[-1]:.2f} on held-out prompts)" if chosen.heldout else ""
    return (
        f"{heads.resolve().name}: {len(chosen.paths)} draft nodes, {chosen.walked[-1]:.2f} tokens "
        f"per step expected{elsewhere}\n{origin(chosen.observations)}"
    )


def _is_tree(document: dict[str, Any]) -> bool:
    """Whether this was written by --output."""
    try:
        read_tree(document)
    except TreeError:
        return False
    note = document.get("source")
    return isinstance(note, dict) and "algorithm" in note
