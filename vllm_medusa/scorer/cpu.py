"""Tree attention over vLLM's paged CPU cache: about a dozen torch operators a layer and group.

Per group: gather the keys [D, L] and values [L, D] of each key head by rows of the flat cache, fold
the query heads of a key head into its rows, and run two batched products around one softmax, all
in fp32: what the stock kernel does too. bf16 products are three times faster but return bf16
logits, whose rounding alone is several times the stock kernel's error; SDPA with a mask was the
slowest of all (benchmarks/results/tree_attention.md).

The products go to oneDNN rather than to the BLAS of torch, twice as fast on the AMD machine
measured. torch picks oneDNN for fp32 products only where bf16 internals are allowed
(``torch.backends.mkldnn.matmul.fp32_precision``), so that setting is changed for the duration of a
call. Where oneDNN makes use of the permission (AMX), bf16 queries and keys lose nothing, and bf16
models have their probabilities rounded to bf16, as in the stock AMX kernel. fp32 and fp16 models
go there only on machines on which a probe finds the products exact.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.scorer.layout import TRANSPOSED_ISAS, CacheLayout
from vllm_medusa.scorer.metadata import TreeAttentionMetadata, TreeGroup

# Logits of one pass; above it the key heads of a lone request take turns (fp32: 64 MiB).
PASS_LIMIT = 16 * 1024 * 1024


class Workspace:
    """Scratch memory that grows to the largest step and is then reused by every layer."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised contiguous tensor; it is overwritten by the next ``take`` of the name."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = torch.empty(size + size // 4, dtype=dtype)
            self._flat[name, dtype] = flat
        return flat[:size].view(shape)


_WORKSPACE = Workspace()  # attention layers of a process run one after another


def tree_attention(
    query: Tensor,  # [rows, num_heads, head_size]
    kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    meta: TreeAttentionMetadata,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend every node to its context and its ancestors; keys and values are in the cache.

    Args:
        query: fp32, bf16 or fp16; the rows may be strided. Only rows of trees are read.
        kv_cache: the layer's cache, of the same dtype and of ``meta.layout``.
        meta: from `build_metadata`; shared by all layers of one layout and window.
        scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); 0 for none.
        sinks: one more logit a head, [num_heads], with no value behind it.
        out: like ``query``, contiguous in the head; allocated when None. Only rows of trees are
            written.

    Returns:
        ``out``.

    ALiBi and quantised caches are not supported: whoever builds the layer must refuse them.

    """
    if kv_cache.dtype != query.dtype:
        raise TypeError(
            f"the KV cache is {kv_cache.dtype} but the queries are {query.dtype}; tree attention "
            "reads unquantised caches only. Start vLLM with --kv-cache-dtype auto."
        )
    if out is None:
        out = torch.empty_like(query)
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if switch is None or not (query.dtype == torch.bfloat16 or onednn_is_exact()):
        for group in meta.groups:
            _attend(query, kv_cache, meta.layout, group, scale, softcap, sinks, out)
        return out
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        for group in meta.groups:
            _attend(query, kv_cache, meta.layout, group, scale, softcap, sinks, out)
    finally:
        switch.fp32_precision = before
    return out


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    layout: CacheLayout,
    group: TreeGroup,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """One group of one layer."""
    requests, nodes = group.num_requests, group.num_nodes
    heads, dim = query.shape[1:]
    kv_heads = layout.num_kv_heads
    batch, rows, length = requests * kv_heads, heads // kv_heads * nodes, group.last - group.first

    gathered = query[group.rows]  # a view for a slice
    q = _WORKSPACE.take("query", (requests, heads, nodes, dim))
    q.copy_(gathered.unflatten(0, (requests, nodes)).transpose(1, 2))
    q = q.view(batch, rows, dim)
    keys, values = _gather(kv_cache, layout, group)  # [batch, D, L], [batch, L, D]
    result = _WORKSPACE.take("result", (batch, rows, dim))

    step = batch
    if requests == 1 and batch * rows * length > PASS_LIMIT:
        step = max(1, PASS_LIMIT // (rows * length))
    for lo in range(0, batch, step):
        part = slice(lo, lo + step)
        logits = _WORKSPACE.take("logits", (min(step, batch - lo), rows, length))
        alpha = scale / softcap if softcap else scale
        torch.baddbmm(logits, q[part], keys[part], beta=0, alpha=alpha, out=logits)
        if softcap:
            logits.tanh_().mul_(softcap)
        by_head = logits.view(requests, -1, nodes, length)
        for mask in group.masks:
            by_head[..., mask.lo : mask.hi].masked_fill_(mask.hidden, float("-inf"))
        if sinks is None:
            torch.softmax(logits, -1, out=logits)
            probabilities = logits
        else:
            probabilities = _softmax_with_sinks(by_head, sinks.view(kv_heads, -1), part)
        torch.bmm(probabilities, values[part], out=result[part])

    nodes_first = result.view(requests, heads, nodes, dim).transpose(1, 2)
    if isinstance(group.out_rows, slice):
        out[group.out_rows].unflatten(0, (requests, nodes)).copy_(nodes_first)
        return
    flat = nodes_first.flatten(0, 1)
    if group.kept is not None:
        flat = flat.index_select(0, group.kept)
    out.index_copy_(0, group.out_rows, flat.to(out.dtype))


def _softmax_with_sinks(by_head: Tensor, sinks: Tensor, part: slice) -> Tensor:
    """Softmax of [requests, heads, nodes, L] with one extra logit a head, which is then dropped.

    ``sinks`` is [key heads, query heads of each]. Returns [heads of all requests, rows, L].
    """
    requests, heads, nodes, length = by_head.shape
    mine = sinks[part] if requests == 1 else sinks
    column = mine.reshape(1, heads, 1, 1).to(by_head.dtype).expand(requests, -1, nodes, -1)
    padded = torch.cat((by_head, column), -1)
    torch.softmax(padded, -1, out=padded)
    return padded.view(requests * mine.shape[0], -1, length + 1)[..., :length]


def _gather(kv_cache: Tensor, layout: CacheLayout, group: TreeGroup) -> tuple[Tensor, Tensor]:
    """Keys fp32 [batch, D, L] and values fp32 [batch, L, D] of a group; heads within requests."""
    size, dim = layout.block_size, layout.head_size
    batch = group.num_requests * layout.num_kv_heads
    columns = slice(group.first, group.last)
    if layout.isa in TRANSPOSED_ISAS:
        keys = _rows("key rows", layout.flat(kv_cache, size), group.key_rows)
        values = _rows("value rows", layout.flat(kv_cache, dim), group.value_rows)
        keys = keys.view(batch, dim, -1)[..., columns]
        return _fp32("keys", keys), _fp32("values", values.view(batch, -1, dim))
    flat = layout.flat(kv_cache, layout.half)
    keys = _rows("key rows", flat, group.key_rows)
    values = _rows("value rows", flat, group.value_rows)
    keys = keys.view(batch, -1, size // 16, dim // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
    values = values.view(batch, -1, dim // 16, size // 2, 16, 2).permute(0, 1, 3, 5, 2, 4)
    keys = _fp32("keys", keys).reshape(batch, dim, -1)[..., columns]
    return keys, _fp32("values", values).reshape(batch, -1, dim)[:, columns]


def _rows(name: str, flat: Tensor, rows: Tensor) -> Tensor:
    shape = (rows.shape[0], flat.shape[1])
    return torch.index_select(flat, 0, rows, out=_WORKSPACE.take(name, shape, flat.dtype))


def _fp32(name: str, source: Tensor) -> Tensor:
    """Cast into scratch memory; fp32 is passed on as it is."""
    if source.dtype == torch.float32:
        return source
    return _WORKSPACE.take(name, tuple(source.shape)).copy_(source)


@functools.cache
def onednn_is_exact() -> bool:
    """Whether fp32 products keep fp32 precision in oneDNN although bf16 internals are allowed."""
    switch: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if switch is None or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    before = switch.fp32_precision
    try:
        for shape, other in (((2, 112, 64), (2, 64, 640)), ((2, 8, 1024), (2, 1024, 64))):
            a = torch.randn(shape, generator=generator)
            b = torch.randn(other, generator=generator)
            switch.fp32_precision = "bf16"
            error = (torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())).abs().max()
            if error > 2e-3:  # bf16 rounding makes it 0.1
                return False
    finally:
        switch.fp32_precision = before
    return True
