"""Node tokens of a draft tree from hidden states.

Node n at depth d with rank r holds the r-th best token of head d - 1, independent of its parent:
Medusa's heads do not depend on each other's choices, so one top-k per depth serves all its nodes
(https://arxiv.org/abs/2401.10774, section 2.1.2).

This is a static tree of Medusa's heads. All other drafters implement one of the two protocols in
`build`; `integration.request_trees.Drafter` lists what a new drafter needs.
"""

from __future__ import annotations

from torch import Tensor

from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.tree.batch import TreeTensors

__all__ = ["propose", "stable_topk"]


def propose(logits: Tensor, tree: TreeTensors, token_map: Tensor | None = None) -> Tensor:
    """Fill a static tree: logits [B, >= max_depth, V_draft] -> target token ids, int64 [B, N].

    The root, column 0, is 0. ``token_map`` (int64 [V_draft]) maps draft ids to target ids;
    ties go to the lower draft id. No host sync.

    Raises ValueError if the tree is deeper than there are heads or wider than the vocabulary.
    """
    width = check_fits(tree, *logits.shape[1:])
    return place(stable_topk(logits[:, : tree.max_depth], width), tree, token_map)


def check_fits(tree: TreeTensors, num_heads: int, vocab_size: int) -> int:
    """Required number of top tokens per head; raises ValueError if the heads have too few."""
    if tree.max_depth > num_heads:
        raise ValueError(
            f"the tree has depth {tree.max_depth}, for {num_heads} heads. Use a shallower tree"
        )
    if tree.width > vocab_size:
        raise ValueError(
            f"the tree needs the best {tree.width} tokens of a head; the heads score {vocab_size}. "
            "Use a narrower tree"
        )
    return tree.width


def place(best: Tensor, tree: TreeTensors, token_map: Tensor | None = None) -> Tensor:
    """Put the heads' best tokens, int64 [B, D, width], at the nodes: int64 [B, N], root 0."""
    tokens = best.flatten(1)[:, tree.places]
    tokens = tokens if token_map is None else token_map[tokens]
    tokens[:, 0] = 0
    return tokens
