"""Tree attention over vLLM's paged CPU cache, in about a dozen operators a layer and group.

Per group: gather the keys [D, L] and values [L, D] of each key head by rows of the flat cache, fold
the query heads of a key head into its rows, and run two batched products around one softmax, all
in fp32: what the stock kernel does too. bf16 products are three times faster but return bf16
logits, whose rounding alone is several times the stock kernel's error; SDPA with a mask was the
slowest of all.

The products go to oneDNN rather than to the BLAS of torch, twice as fast on the AMD machine
measured. torch picks oneDNN for fp32 products only where bf16 internals are allowed
(``torch.backends.mkldnn.matmul.fp32_precision``), so that setting is changed for the duration of a
call. Where oneDNN makes use of the permission (AMX), it rounds probabilities to bf16. Layers whose
stock kernel does so too (isa "amx") want that, and of the same numbers: those that are 1 where a
node attends most (`_weigh`). All other layers go to oneDNN only on machines on which a probe finds
the products exact. (vLLM: csrc/cpu/cpu_attn_impl.hpp, apply_softmax.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import TreeGroup
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.metadata import AttentionPlan
from vllm_medusa.scorer.scratch import Pass, Scratch, Workspace, bind

# Multiply-adds of one product from which oneDNN, slower to start, is the quicker.
ONEDNN_FROM = 768 * 1024
# torch before 2.9 has no such switch: its BLAS does the work
HAS_SWITCH = torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")
_BF16_BITS = -0x10000  # of an fp32 number: the upper half
_WORKSPACE = Workspace()  # attention layers of a process run one after another


def tree_attention(
    query: Tensor,  # [rows, num_heads, head_size]
    kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    meta: AttentionPlan,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    *,
    truncate: bool = False,
) -> Tensor:
    """Attend every node to its context and its ancestors; keys and values are in the cache.

    Args:
        query: fp32, bf16 or fp16; the rows may be strided. Only rows of trees are read.
        kv_cache: the layer's cache, of the same dtype and of ``meta.layout``.
        meta: from `build_metadata` or `build_branches`; shared by the layers of one layout and
            window.
        scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); 0 for none.
        sinks: one more logit a head, [num_heads], with no value behind it.
        out: like ``query``, contiguous in the head; allocated when None. Only rows of trees are
            written.
        truncate: cut results off to bf16 instead of rounding them, as vLLM's kernel for CPUs
            without AVX-512 does.

    Returns:
        ``out``.

    ALiBi and quantised caches are not supported; the layer refuses them.

    """
    if kv_cache.dtype != query.dtype:
        raise TypeError(
            f"the KV cache is {kv_cache.dtype} but the queries are {query.dtype}; tree attention "
            "reads unquantised caches only. Start vLLM with --kv-cache-dtype auto."
        )
    if out is None:
        out = torch.empty_like(query)
    dtype, heads = query.dtype, query.shape[1]
    scratches = meta.scratches.get((dtype, heads))
    if scratches is None:
        scratches = [bind(_WORKSPACE, g, meta.layout, heads, dtype) for g in meta.groups]
        meta.scratches[dtype, heads] = scratches
    rounds = _stock_rounds(meta.layout, dtype)
    may_switch = HAS_SWITCH and (rounds or onednn_is_exact())
    for group, scratch in zip(meta.groups, scratches, strict=True):
        with _onednn(may_switch and (rounds or scratch.macs >= ONEDNN_FROM)):
            _attend(query, kv_cache, meta.layout, group, scratch, scale, softcap, sinks)
        if truncate and dtype == torch.bfloat16:
            scratch.result.view(torch.int32).bitwise_and_(_BF16_BITS)
        _write(group, scratch.result, out)
    return out


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    layout: CacheLayout,
    group: TreeGroup,
    scratch: Scratch,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """One group of one layer, into ``scratch.result``."""
    requests, nodes = group.num_requests, group.num_nodes
    rows = query[group.rows]  # a view for a slice
    scratch.query.copy_(rows.unflatten(0, (requests, nodes)).transpose(1, 2))
    for target, indices in (
        (scratch.key_rows, group.key_rows),
        (scratch.value_rows, group.value_rows),
    ):
        torch.index_select(layout.flat(kv_cache, target.shape[1]), 0, indices, out=target)
    for target, source in scratch.casts:
        target.copy_(source)

    alpha = scale / softcap if softcap else scale
    for part in scratch.passes:
        probabilities = part.logits
        torch.baddbmm(part.logits, part.query, part.keys, beta=0, alpha=alpha, out=part.logits)
        if softcap:
            part.logits.tanh_().mul_(softcap)
        for logits, hidden in part.hidden:
            logits.masked_fill_(hidden, float("-inf"))
        if sinks is None:
            torch.softmax(part.logits, -1, out=part.logits)
        else:
            probabilities = _softmax_with_sinks(part, sinks.view(layout.num_kv_heads, -1))
        _weigh(probabilities, part, _stock_rounds(layout, query.dtype))


def _write(group: TreeGroup, result: Tensor, out: Tensor) -> None:
    """Round a group's result [requests, nodes, heads, head_size], fp32, into its rows."""
    if isinstance(group.out_rows, slice):
        out[group.out_rows].unflatten(0, (group.num_requests, group.num_nodes)).copy_(result)
        return
    result = result.flatten(0, 1)
    if group.kept is not None:
        result = result.index_select(0, group.kept)
    out.index_copy_(0, group.out_rows, result.to(out.dtype))


def _stock_rounds(layout: CacheLayout, dtype: torch.dtype) -> bool:
    """Whether vLLM's kernel for such layers rounds probabilities."""
    return layout.isa == "amx" and dtype == torch.bfloat16


def _weigh(probabilities: Tensor, part: Pass, rounded: bool) -> None:
    """Sum the values by their probabilities, which change.

    ``rounded``: stock AMX attention rounds exp(logit - largest logit) to bf16, divides by the sum
    of the unrounded ones afterwards. Rounded probabilities would differ in a third of all outputs.
    """
    if rounded:
        best = probabilities.amax(-1, keepdim=True)  # 1 / the sum
        probabilities.div_(best)
    torch.bmm(probabilities, part.values, out=part.result)
    if rounded:
        part.result.mul_(best)


def _softmax_with_sinks(part: Pass, sinks: Tensor) -> Tensor:
    """Softmax with one extra logit a head, which is then dropped.

    ``sinks`` is [key heads, query heads of each]. Returns the shape of ``part.logits``.
    """
    requests, heads, nodes, length = part.by_head.shape
    column = sinks[part.key_heads].reshape(1, heads, 1, 1).to(part.by_head.dtype)
    padded = torch.cat((part.by_head, column.expand(requests, -1, nodes, -1)), -1)
    torch.softmax(padded, -1, out=padded)
    return padded.view(*part.logits.shape[:2], length + 1)[..., :length]


@contextmanager
def _onednn(wanted: bool) -> Iterator[None]:
    """Send fp32 products to oneDNN."""
    if not wanted:
        yield
        return
    switch: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009, as torch 2.6 lacks it
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


@functools.cache
def onednn_is_exact() -> bool:
    """Whether fp32 products keep fp32 precision in oneDNN although bf16 internals are allowed."""
    if not HAS_SWITCH:
        return False
    generator = torch.Generator().manual_seed(0)
    for shape, other in (((2, 112, 64), (2, 64, 640)), ((2, 8, 1024), (2, 1024, 64))):
        a = torch.randn(shape, generator=generator)
        b = torch.randn(other, generator=generator)
        with _onednn(True):
            product = torch.bmm(a, b)
        error = (product.double() - torch.bmm(a.double(), b.double())).abs().max()
        if error > 2e-3:  # rounding to bf16 makes it 0.1
            return False
    return True
