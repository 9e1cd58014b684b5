"""Tree attention written to be read: one request and one node at a time, in fp64.

The same signature as `vllm_medusa.scorer.cpu.tree_attention`, none of its plan: it reads the trees,
contexts and block tables from the metadata and the tokens by their slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.scorer.layout import gather_tokens
from vllm_medusa.scorer.metadata import TreeAttentionMetadata


def tree_attention_reference(
    query: Tensor,  # [rows, num_heads, head_size]
    kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    meta: TreeAttentionMetadata,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend every node to its context and its ancestors; see `tree_attention` for the arguments.

    Returns ``out``, or a new fp64 tensor where None is given.
    """
    if out is None:
        out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // meta.layout.num_kv_heads
    for b in range(meta.tree.batch_size):
        base = int(meta.base[b])
        for i in range(int(meta.tree.num_nodes[b])):
            depth = int(meta.tree.depths[b, i])
            # the keys of node i: (slot index in the request, position)
            seen = [(c, c) for c in range(base)]
            seen += [
                (base + j, base + int(meta.tree.depths[b, j]))
                for j in range(i + 1)
                if meta.tree.ancestors[b, i, j]
            ]
            if meta.window is not None:
                seen = [(s, p) for s, p in seen if p > base + depth - meta.window]
            index = torch.tensor([s for s, _ in seen])
            size = meta.layout.block_size
            slots = meta.block_table[b, index // size].long() * size + index % size
            keys, values = gather_tokens(kv_cache, meta.layout.isa, slots)  # [L, Hkv, D]
            keys = keys.double().repeat_interleave(group, dim=1)  # [L, Hq, D]
            values = values.double().repeat_interleave(group, dim=1)
            row = int(meta.row_starts[b]) + i
            logits = torch.einsum("hd,lhd->hl", query[row].double(), keys) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat((logits, sinks.double().unsqueeze(1)), dim=1)
            weights = torch.softmax(logits, dim=1)[:, : len(seen)]
            out[row] = torch.einsum("hl,lhd->hd", weights, values).to(out.dtype)
    return out
