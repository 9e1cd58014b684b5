"""One builder of draft trees for every family of drafters, on the device, of fixed shapes.

A drafter knows one of two things, and is asked for no more:

- `Marginal`: how likely a token is at a depth, whatever stands above it (Medusa). The candidates
  are the nodes of a pool, a large static tree.
- `Branching`: how likely a token is below a node, given the node's own path (Hydra, EAGLE). Of
  each level the k nodes of the highest value are expanded, K choices each; all are candidates.

Either way the best N of all candidates are the tree (`candidates`). A static tree of ranks is
filled level by level (`fill_tree`). Nothing here waits for the device.

    level 0      expand(0, root)               -> K choices below the root
    level 1      expand(1, the k best of them) -> k * K choices, each below one of the k
    ...          and so on, as deep as the beam
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_medusa.proposer.candidates import IMPOSSIBLE, Candidates, Choices, Proposal
from vllm_medusa.tree.dynamic import Beam
from vllm_medusa.tree.pool import Pool
from vllm_medusa.tree.topology import TokenTree


class Marginal(Protocol):
    """A drafter whose levels don't see each other, at one step of some requests."""

    def marginals(self, depth: int, width: int) -> Choices:
        """The best ``width`` choices of the first ``depth`` levels: [B, depth, width]."""
        ...


class Branching(Protocol):
    """A drafter that sees the branch, at one step of some requests."""

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """The best ``width`` choices below each of k nodes: [B, k, width].

        Called for level 0, 1, 2, .. in turn, so that what is needed of the nodes can be kept.

        Args:
            level: Depth of the nodes; 0 is the root alone.
            tokens: int64 [B, k], the nodes' own tokens. The root's is the token that the target
                gave last.
            parents: int64 [B, k], which of the nodes of the call before each node is a child of;
                0 for the root. A node may stand there that can't be right; its choices are unread.
            width: Choices wanted, at least 1.

        """
        ...


def build_tree(
    drafter: Marginal | Branching,
    source: Pool | Beam,  # what the drafter fills: a `Pool` if marginal, a `Beam` if branching
    root: Tensor,  # int64 [B], the tokens that the target gave last; marginals don't need them
    num_nodes: int,  # of each tree, root included
    max_depth: Tensor,  # int64 [B], the deepest node that each request has a use for
    limit: int | None = None,  # drafts of a request that are of use, from 1; None: all
) -> Proposal:
    """A tree for each request, the same on every rank if the drafter's choices are.

    With ``limit`` no level deeper than that is drafted and no more nodes of one expanded: the best
    so many drafts are the same.
    """
    limit = num_nodes if limit is None else min(limit, num_nodes)
    if isinstance(source, Pool):
        depth = min(source.tensors.max_depth, limit)
        choices = drafter.marginals(depth, source.width)  # type: ignore[union-attr]
        return of_pool(choices, source).tree(num_nodes, max_depth)
    candidates = of_beam(drafter, source.within(limit), root)  # type: ignore[arg-type]
    return candidates.tree(num_nodes, max_depth)


def of_pool(choices: Choices, pool: Pool) -> Candidates:
    """The pool's nodes with the choices [B, <= max_depth, width] of a marginal drafter.

    Nodes deeper than there are choices can't survive.
    """
    tokens = choices.token_ids.flatten(1)  # [B, D * width]
    places = pool.last_place.clamp_max(tokens.shape[1] - 1)  # [M]
    return Candidates(
        token_ids=tokens[:, places],
        parents=pool.tensors.parents.expand(len(tokens), -1),
        depths=pool.tensors.depths,
        value=pool.survival(choices.log_confidence),
    )


def of_beam(drafter: Branching, beam: Beam, root: Tensor) -> Candidates:
    """The root and all choices of all levels of a branching drafter: M = `beam.num_nodes`."""
    batch, width = len(root), beam.choices
    shape = _beam_on(beam, root.device)
    tokens, values = [root[:, None]], [root.new_zeros((batch, 1), dtype=torch.float32)]
    parents = [root.new_full((batch, 1), -1)]
    expanded = root.new_zeros((batch, 1))  # int64 [B, k], candidates
    slots, first = expanded, 0  # which of the nodes expanded before each is a child of
    for level in range(beam.depth):
        below = tokens[-1].gather(1, expanded - first)  # [B, k]
        choices = drafter.expand(level, below, slots, width)
        value = values[-1].gather(1, expanded - first).unsqueeze(-1) + choices.log_confidence
        first += tokens[-1].shape[1]
        tokens.append(choices.token_ids.flatten(1))  # [B, k * K]
        values.append(value.flatten(1))
        parents.append(expanded.repeat_interleave(width, 1))
        order = values[-1].sort(dim=-1, descending=True, stable=True).indices[:, : beam.width]
        expanded, slots = order + first, order // width
    return Candidates(torch.cat(tokens, 1), torch.cat(parents, 1), shape, torch.cat(values, 1))


@dataclass(frozen=True, eq=False)
class Plan:
    """How a static tree is filled level by level, on one device."""

    nodes: tuple[Tensor, ...]  # int64 [k] of each level: nodes that have children
    slots: tuple[Tensor, ...]  # int64 [k]: which of the level above each is a child of
    widths: tuple[int, ...]  # choices wanted of each level
    children: tuple[Tensor, ...]  # int64 [c]: the nodes of the next level
    places: tuple[Tensor, ...]  # int64 [c]: where in [k * width] choices each is
    num_nodes: int

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str = "cpu") -> Plan:
        """Lay ``tree`` out; its ranks are those of a node's own choices."""
        inner = sorted(set(tree.parents[1:]))
        levels = [[n for n in inner if tree.depths[n] == d] for d in range(tree.max_depth)]
        slot = {node: place for level in levels for place, node in enumerate(level)}
        below = [
            [n for n in range(1, tree.num_nodes) if tree.depths[n] == d + 1]
            for d in range(tree.max_depth)
        ]
        widths = tuple(max(tree.ranks[n] for n in level) + 1 for level in below)

        def on(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            nodes=tuple(map(on, levels)),
            slots=tuple(on([slot.get(tree.parents[n], 0) for n in level]) for level in levels),
            widths=widths,
            children=tuple(map(on, below)),
            places=tuple(
                on([slot[tree.parents[n]] * width + tree.ranks[n] for n in level])
                for level, width in zip(below, widths, strict=True)
            ),
            num_nodes=tree.num_nodes,
        )


def fill_tree(drafter: Branching, plan: Plan, root: Tensor) -> Tensor:
    """The tokens of a static tree: root int64 [B] -> int64 [B, N], column 0 unset (0)."""
    batch = len(root)
    tokens = root.new_zeros((batch, plan.num_nodes))
    tokens[:, 0] = root
    for level, (nodes, slots) in enumerate(zip(plan.nodes, plan.slots, strict=True)):
        choices = drafter.expand(
            level, tokens[:, nodes], slots.expand(batch, -1), plan.widths[level]
        )
        tokens[:, plan.children[level]] = choices.token_ids.flatten(1)[:, plan.places[level]]
    tokens[:, 0] = 0
    return tokens


def clean(log_confidence: Tensor) -> Tensor:
    """At most 0, and -inf where logits were NaN, so that values can be sorted."""
    return log_confidence.nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE).clamp_max(0)


@functools.lru_cache(maxsize=64)
def _beam_on(beam: Beam, device: torch.device) -> Tensor:
    """int64 [M]: the depth of each candidate."""
    counts = [
        1,
        beam.choices,
        *[beam.width_at(level) * beam.choices for level in range(1, beam.depth)],
    ]
    return torch.repeat_interleave(torch.arange(beam.depth + 1), torch.tensor(counts)).to(device)
