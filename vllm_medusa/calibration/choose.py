"""Choose the best draft tree for calibrated heads, and write it into their config.

Estimates on the texts that a tree was built from are biased. So besides the tree from all texts,
one is built from each half of the prompts and walked on the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.calibrate import check_folder
from vllm_medusa.calibration.observations import FILE, Observations
from vllm_medusa.calibration.options import TreeOptions
from vllm_medusa.calibration.walks import Walks, walk_taus, walked_tree
from vllm_medusa.heads.checkpoint import update_config
from vllm_medusa.heads.files import digest_heads, find_checkpoint
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.tree.topology import NodePath


@dataclass(frozen=True)
class Chosen:
    """A tree and its estimates.

    ``walked`` and ``heldout`` are tokens per step with the first 1, 2, .. nodes of the tree: on the
    texts that it was built from, and on other prompts with a tree of that size built without them.
    """

    observations: Observations  # the calibration that it is based on
    paths: list[NodePath]  # best first
    walked: list[float]
    heldout: list[float] | None  # None: all texts have one prompt
    chances: dict[NodePath, float]  # fraction of steps that accept each node, the root () included


def choose_tree(
    options: TreeOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Chosen:
    """Build the tree with the most tokens per step for calibrated heads, and save it with them."""
    heads = options.heads
    check_folder(heads)
    observations = Observations.load(heads)
    digest = observations.source.get("heads")
    if digest is not None and digest != digest_heads(find_checkpoint(heads)):
        raise CalibrationError(
            f"the heads in {heads} have changed since they were calibrated, so the calibration is "
            "outdated; run `vllm-medusa calibrate` again."
        )
    progress.at("building trees", 0, 1)
    chosen = best_tree(observations, options.num_draft_tokens)
    progress.at("building trees", 1, 1)
    paths, heldout = chosen.paths, chosen.heldout
    if len(paths) < options.num_draft_tokens:
        progress.warn(
            f"{options.num_draft_tokens} nodes were requested; the tree has {len(paths)}, "
            f"from {observations.num_heads} heads with {observations.num_ranks} choices each."
        )
    taus = [round(tau, 4) for tau in chosen.walked]
    source = {
        "algorithm": "walk",
        "temperature": observations.temperature(),
        "positions": len(observations.ranks),
        "tokens_per_step": taus,
        "tokens_per_step_heldout": heldout and [round(tau, 4) for tau in heldout],
    }
    update_config(
        heads,
        tree=[list(path) for path in paths],
        tree_tokens_per_step=taus,
        tree_source=source,
        provenance=provenance(command, [heads / FILE]),
    )
    return chosen


def best_tree(observations: Observations, size: int) -> Chosen:
    """Build the tree of up to ``size`` nodes, and estimate each of its prefixes."""
    texts, width = observations.texts(), observations.num_ranks
    paths = walked_tree(texts, size, width)
    heldout = None
    if halves := observations.halves():
        first, second = map(observations.texts, halves)
        taus = (
            walk_taus(other, walked_tree(own, size, width))
            for own, other in ((first, second), (second, first))
        )
        heldout = [(a + b) / 2 for a, b in zip(*taus, strict=True)]
    walks = Walks(texts, paths)
    visits = walks.visits()
    chances = {path: float(n / visits[0]) for path, n in zip(walks.paths, visits, strict=True)}
    return Chosen(observations, paths, walk_taus(texts, paths), heldout, chances)


def origin(observations: Observations) -> str:
    """Describe the texts of a calibration."""
    temperature = observations.temperature()
    source = "text of other origin" if temperature is None else f"T = {temperature:g}"
    return f"{len(observations.ranks)} positions, {source}"
