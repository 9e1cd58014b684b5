"""One builder of draft trees for all kinds of drafters, on the device, with fixed shapes.

A drafter provides one of two kinds of probabilities:

- `Marginal`: the probability of a token at a depth, independent of its parent (Medusa). Candidates
  are the nodes of a pool, a large static tree.
- `Branching`: the probability of a token below a node, given the node's path (Hydra, EAGLE). At
  each level the best k nodes are expanded, with K choices each; all are candidates.

In both cases the tree is the best N of all candidates (`DraftTrees.best`). A static tree has a
fixed rank for every node instead (`fill_tree`). Nothing waits for a device; on the host, where
values are available, only nodes whose children can be among the best N are expanded. How to add a
drafter: see `integration.drafters.drafter.Drafter`.

    level 0      expand(0, root)               -> K choices below the root
    level 1      expand(1, the k best of them) -> k * K choices, each below one of the k
    ...          and so on, as deep as the beam
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.proposer.choices import Choices
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import IMPOSSIBLE, DraftTrees
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.topology import TokenTree


class Marginal(Protocol):
    """A drafter whose levels are independent, for one step of some requests.

    One top-k per depth serves all nodes (https://arxiv.org/abs/2401.10774, section 2.1.2).
    """

    def marginals(self, depth: int, width: int) -> Choices:
        """The best ``width`` choices of the first ``depth`` levels: [B, <= depth, width]."""
        ...


class Branching(Protocol):
    """A drafter that depends on the branch, for one step of some requests."""

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """The best ``width`` choices below each of k nodes: [B, k, width].

        Called for levels 0, 1, 2, .. in order, so that state of the nodes can be kept.

        Args:
            level: Depth of the nodes; 0 for the root.
            tokens: int64 [B, k], the nodes' own tokens; the root's is the token that the
                target sampled last.
            parents: int64 [B, k], index of each node's parent among the nodes of the previous call;
                0 for the root. Choices below an impossible node are not read.
            width: Number of choices, at least 1.

        """
        ...


def build_tree(
    drafter: Marginal | Branching,
    source: TreeTensors | Beam,  # a pool for marginal drafters, a beam for branching ones
    root: Tensor,  # int64 [B], the last sampled tokens; unused by marginals
    num_nodes: int,  # of each tree, root included
    max_depth: Tensor,  # int64 [B], max useful depth of each request
    limit: int | None = None,  # max useful drafts per request, at least 1; None: all
) -> DraftTrees:
    """A tree for each request, equal on all ranks if the drafter's choices are.

    With ``limit``, no deeper level is drafted and no more nodes per level are expanded: the best
    ``limit`` drafts are the same.
    """
    limit = num_nodes if limit is None else min(limit, num_nodes)
    if isinstance(source, TreeTensors):
        choices = drafter.marginals(min(source.max_depth, limit), source.width)  # type: ignore[union-attr]
        found = of_pool(choices, source)
        value = found.log_survival.masked_fill(source.depths > max_depth[:, None], IMPOSSIBLE)
        return replace(found, log_survival=value).best(num_nodes)
    return of_beam(drafter, source.within(limit), root, max_depth, limit).best(num_nodes)  # type: ignore[arg-type]


def of_pool(choices: Choices, pool: TreeTensors) -> DraftTrees:
    """The pool's nodes with the choices [B, <= max_depth, width] of a marginal drafter.

    Nodes deeper than the choices can't survive.
    """
    tokens = _placed(choices, pool)
    return DraftTrees.of(
        tokens, pool.parents.expand_as(tokens), pool.survival(choices.log_confidence)
    )


def _placed(choices: Choices, tree: TreeTensors) -> Tensor:
    """The choices [B, <= max_depth, width] at the nodes of their depth and rank: int64 [B, N]."""
    tokens = choices.token_ids.flatten(1)
    return tokens[:, tree.places.clamp_max(tokens.shape[1] - 1)]


def of_beam(
    drafter: Branching, beam: Beam, root: Tensor, max_depth: Tensor, limit: int
) -> DraftTrees:
    """The root and the choices of the levels of a branching drafter: M <= `beam.num_nodes`.

    Choices deeper than ``max_depth`` can't survive. On a device M is `beam.num_nodes`.
    """
    batch, width = len(root), beam.choices
    tokens, values = [root[:, None]], [root.new_zeros((batch, 1), dtype=torch.float32)]
    parents = [root.new_full((batch, 1), -1)]
    expanded = root.new_zeros((batch, 1))  # int64 [B, k], candidates
    slots, first = expanded, 0  # index of each node's parent among the nodes expanded before
    for level in range(beam.depth):
        below = tokens[-1].gather(1, expanded - first)  # [B, k]
        choices = drafter.expand(level, below, slots, width)
        value = values[-1].gather(1, expanded - first).unsqueeze(-1) + choices.log_confidence
        first += tokens[-1].shape[1]
        tokens.append(choices.token_ids.flatten(1))  # [B, k * K]
        values.append(value.flatten(1).masked_fill(max_depth[:, None] <= level, IMPOSSIBLE))
        parents.append(expanded.repeat_interleave(width, 1))
        if level + 1 == beam.depth:
            break
        best, order = values[-1].sort(dim=-1, descending=True, stable=True)
        order = order[:, : beam.width]
        if not uses_kernel(root.device.type):
            best = best.masked_fill(max_depth[:, None] <= level + 1, IMPOSSIBLE)
            order = order[:, : _num_useful(best, torch.cat(values, 1), limit)]
            if not order.shape[1]:
                break
        expanded, slots = order + first, order // width
    return DraftTrees.of(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(values, 1))


def _num_useful(level: Tensor, candidates: Tensor, limit: int) -> int:
    """How many nodes of a level, best first, can have a child among the best ``limit`` drafts.

    No child has a higher value than its parent, or precedes an earlier node of equal value. Values:
    ``level`` [B, k], ``candidates`` [B, M], the root among them.
    """
    if candidates.shape[1] > limit:
        last = candidates.topk(limit + 1).values[:, -1:]  # of the best drafts so far
    else:
        last = level.new_tensor(IMPOSSIBLE)
    return int((level > last).sum(1).max())


def fill_tree(drafter: Marginal | Branching, tree: TokenTree, root: Tensor) -> DraftTrees:
    """A whole static tree, whose ranks are those of each node's own choices; root int64 [B].

    Raises ValueError if the tree is wider than the drafter's vocabulary.
    """
    tensors = tensors_on(tree, root.device)
    if marginals := getattr(drafter, "marginals", None):
        return DraftTrees.static(
            tensors, _placed(marginals(tree.max_depth, tensors.width), tensors)
        )
    tokens = root.new_zeros((len(root), tree.num_nodes))
    tokens[:, 0] = root
    for depth, level in enumerate(_levels(tree, root.device)):
        slots = level.slots.expand(len(root), -1)
        choices = drafter.expand(depth, tokens[:, level.nodes], slots, level.width)  # type: ignore[union-attr]
        tokens[:, level.children] = choices.token_ids.flatten(1)[:, level.places]
    return DraftTrees.static(tensors, tokens)


def source_on(tree: DynamicTree, device: torch.device) -> TreeTensors | Beam:
    """The candidate source of `build_tree`, on ``device``."""
    return tree.pool if isinstance(tree.pool, Beam) else tensors_on(tree.pool, device)


@functools.lru_cache(maxsize=8)
def tensors_on(tree: TokenTree, device: torch.device) -> TreeTensors:
    """The tree on ``device``, cached."""
    return TreeTensors.from_tree(tree, device)


class _Level(NamedTuple):
    """How one level of a static tree is filled."""

    nodes: Tensor  # int64 [k]: nodes of the level that have children
    slots: Tensor  # int64 [k]: index of each node's parent in the level above
    width: int  # number of choices
    children: Tensor  # int64 [c]: the nodes of the next level
    places: Tensor  # int64 [c]: index of each in the [k * width] choices


@functools.lru_cache(maxsize=8)
def _levels(tree: TokenTree, device: torch.device) -> list[_Level]:
    inner = sorted(set(tree.parents[1:]))
    slot: dict[int, int] = {-1: 0}
    levels = []
    for depth in range(tree.max_depth):
        nodes = [node for node in inner if tree.depths[node] == depth]
        below = [node for node in range(1, tree.num_nodes) if tree.depths[node] == depth + 1]
        width = max(tree.ranks[node] for node in below) + 1
        slots = [slot[tree.parents[node]] for node in nodes]
        slot |= {node: place for place, node in enumerate(nodes)}
        places = [slot[tree.parents[node]] * width + tree.ranks[node] for node in below]
        on_device = [torch.tensor(each, device=device) for each in (nodes, slots, below, places)]
        levels.append(_Level(on_device[0], on_device[1], width, on_device[2], on_device[3]))
    return levels
