"""Lossless acceptance: sample from the target and descend while the drafts match.

At the root, sample a token exactly as plain decoding would. If it is the token of a child, that
child is accepted: continue there. Otherwise the step ends, and the sampled token is
its last. Every emitted token is thus sampled from the target given the tokens before it,
independent of the drafts, so the output distribution is the target's. With one sample per token, a
seeded request even gives the same tokens as without speculation.

For drafts that are a fixed function of the context this is the rule of Leviathan et al.
(https://arxiv.org/abs/2211.17192) with a one-hot q: x is accepted with probability p(x), and the
residual after a rejection is p without x. Siblings come at no extra cost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_medusa.sampler.path import NO_TOKEN, Path, Verdict
from vllm_medusa.tree.batch import TreeBatch

# (level, nodes int64 [B], active bool [B]) -> token ids int64 [B] sampled at those nodes.
# Values of inactive requests are ignored; their generators need not be advanced.
NodeSampler = Callable[[int, Tensor, Tensor], Tensor]


def lossless_walk(tree: TreeBatch, token_ids: Tensor, sample: NodeSampler) -> Verdict:
    """Walk all requests down their trees, one call of ``sample`` per level.

    ``token_ids`` is int64 [B, N]. Of siblings with the sampled token, the first in node order
    is taken. Stops once no request is active: a host sync per level.
    """
    index = torch.arange(tree.max_nodes, device=tree.parents.device)  # [N]
    children = torch.where(tree.valid, tree.parents, -1)  # [B, N]: padding is not a child
    active = torch.ones_like(tree.num_nodes, dtype=torch.bool)  # [B]
    node = torch.zeros_like(tree.num_nodes, dtype=torch.int64)  # [B]
    num_accepted = torch.zeros_like(node)
    nodes, outputs = [], []
    for level in range(tree.max_depth + 1):
        if not bool(active.any()):
            break
        nodes.append(node)
        token = sample(level, node, active)
        outputs.append(torch.where(active, token, NO_TOKEN))
        found = (children == node.unsqueeze(1)) & (token_ids == token.unsqueeze(1))  # [B, N]
        child = torch.where(found, index, tree.max_nodes).amin(1)  # first such child, or N
        active = active & (child < tree.max_nodes)
        node = torch.where(active, child, node)
        num_accepted = num_accepted + active
    missing = tree.max_depth + 1 - len(nodes)
    nodes += [node] * missing
    outputs += [torch.full_like(node, NO_TOKEN)] * missing
    return Verdict(Path(torch.stack(nodes, 1), num_accepted, node), torch.stack(outputs, 1))
