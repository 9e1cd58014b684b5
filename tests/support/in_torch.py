"""What the Triton kernels compute, in torch: the expectations of their tests."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.kv import accepted_moves, copy_slots
from vllm_medusa.kv.kernel import LayerCaches
from vllm_medusa.sampler import Path, typical
from vllm_medusa.scorer.paged import FP8_DTYPES, PagedBatch
from vllm_medusa.tree.ancestors import WORD_BITS
from vllm_medusa.tree.batch import TreeBatch


def attention_reference(
    query: Tensor,  # [n, Hq, D]
    keys: Tensor,  # [L, Hkv, D]
    values: Tensor,  # [L, Hkv, D]
    seen: Tensor,  # bool [n, L]
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
) -> Tensor:
    """Attend the rows of one request to their visible keys; keys that no row sees may be NaN.

    Returns fp64 [n, Hq, D], 0 for a row that sees nothing.
    """
    used = seen.any(0)
    group = query.shape[1] // keys.shape[1]
    keys, values = (t[used].double().repeat_interleave(group, 1) for t in (keys, values))
    logits = torch.einsum("nhd,lhd->nhl", query.double(), keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, used].unsqueeze(1), float("-inf"))
    total = torch.logsumexp(logits, 2)  # [n, Hq]
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double())
    shift = total.masked_fill(total == float("-inf"), 0.0)
    weights = torch.exp(logits - shift.unsqueeze(2))
    return torch.einsum("nhl,lhd->nhd", weights, values)


def paged_tree_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    out: Tensor,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`launch.paged_tree_attention` in fp64, request by request; ``out`` may be fp64."""
    block_size = key_cache.shape[1]
    starts = batch.cu_query_lens.tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        own = batch.rows_before + n
        base = length - own
        place, seen = _own_rows(batch, b, own)  # [own], [own, own]
        seen = seen[batch.rows_before :]  # [n, own]
        context = torch.arange(max(base, 0), device=query.device)
        slots = torch.cat((context, base + torch.arange(own, device=query.device)))  # [L]
        positions = torch.cat((context, base + place))  # [L]
        seen = torch.cat((seen.new_ones(n, len(context)), seen), 1)  # [n, L]
        seen &= slots >= 0
        if window is not None:
            seen &= positions > (base + place[batch.rows_before :]).unsqueeze(1) - window
        used = seen.any(0)
        slots, seen = slots[used], seen[:, used]
        blocks = batch.block_table[b, slots // block_size].long()
        keys, values = (
            _tokens(cache, blocks, slots % block_size, factor)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )  # [L, Hkv, D]
        result = attention_reference(query[rows], keys, values, seen, scale, softcap, sinks)
        out[rows] = result.to(out.dtype)
    return out


def unpack_ancestors(bits: Tensor, num_nodes: int) -> Tensor:
    """Undo `pack_ancestors`: int64 [..., N, W] -> bool [..., N, num_nodes]."""
    spread = (bits.unsqueeze(-1) >> torch.arange(WORD_BITS, device=bits.device)) & 1
    return spread.flatten(-2)[..., :num_nodes].to(torch.bool)


def _own_rows(batch: PagedBatch, b: int, n: int) -> tuple[Tensor, Tensor]:
    """Each row's position after the context, int64 [n], and the rows that it sees, bool [n, n]."""
    causal = torch.ones(n, n, dtype=torch.bool, device=batch.seq_lens.device).tril()
    if not bool(batch.is_tree[b]):
        return torch.arange(n, device=causal.device), causal
    ancestors = unpack_ancestors(batch.ancestor_bits[b, :n], n)
    return batch.depths[b, :n].long(), ancestors & causal


def _tokens(cache: Tensor, blocks: Tensor, offsets: Tensor, factor: Tensor | None) -> Tensor:
    """fp64 [L, Hkv, D], dequantized."""
    if cache.dtype in FP8_DTYPES:  # not every device supports indexing of fp8
        tokens = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype).double()
    else:
        tokens = cache[blocks, offsets].double()
    return tokens if factor is None else tokens * factor.double().reshape(())


def compact_layers_torch(
    layers: LayerCaches, slots: Tensor, path_nodes: Tensor, num_accepted: Tensor
) -> None:
    """`kv.kernel.compact_layers`."""
    src, dst = accepted_moves(slots, path_nodes, num_accepted)
    for cache in layers.caches:
        copy_slots(cache, src, dst, (0, 2))


def typical_path_torch(
    tree: TreeBatch,
    token_ids: Tensor,
    logits: Tensor,
    row_of_node: Tensor,
    epsilon: Tensor,
    delta: Tensor,
) -> Path:
    """`sampler.launch.typical_path`, up to rounding."""
    probs = logits[row_of_node].softmax(-1, dtype=torch.float32)  # [B, N, V]
    return typical.typical_path(tree, token_ids, probs, epsilon, delta)
