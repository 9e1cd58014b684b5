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

import numpy as np
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
    is taken. Stops once no request is active. On the host, in numpy: the arrays are small.
    """
    device, columns = token_ids.device, tree.max_depth + 1
    given = (token_ids, tree.parents, tree.num_nodes)
    ids, parents, counts = (tensor.cpu().numpy() for tensor in given)
    batch, width = ids.shape
    children = np.where(np.arange(width) < counts[:, None], parents, -1)  # padding is not a child
    nodes = np.zeros((batch, columns), dtype=np.int64)
    outputs = np.full((batch, columns), NO_TOKEN)
    active, node = np.ones(batch, dtype=bool), np.zeros(batch, dtype=np.int64)
    num_accepted = np.zeros(batch, dtype=np.int64)
    for level in range(columns):
        if not active.any():
            break
        nodes[:, level:] = node[:, None]
        where = torch.from_numpy(node).to(device), torch.from_numpy(active).to(device)
        token = sample(level, *where).cpu().numpy()
        outputs[:, level] = np.where(active, token, NO_TOKEN)
        match = (children == node[:, None]) & (ids == token[:, None])  # [B, N]
        active = active & match.any(1)
        node = np.where(active, match.argmax(1), node)
        num_accepted += active
    found = (nodes, num_accepted, node, outputs)
    *path, output_token_ids = (torch.from_numpy(each).to(device) for each in found)
    return Verdict(Path(*path), output_token_ids)
