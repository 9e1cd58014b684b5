"""Tree attention over vLLM's paged CPU cache: the plan of a step, and the kernel."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from vllm_medusa.kernels import CPU_DTYPES, cpu_function
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.tree.ancestors import num_words
from vllm_medusa.tree.batch import TreeBatch


class AttentionPlan(Structure):
    """A step's plan, shared by layers of the same layout and window; `Plan` in attention.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("requests", "heads", "kv_heads", "dim", "block_size")),
        *((name, c_int64) for name in ("block_stride", "window", "max_blocks", "mask_request")),
        *((name, c_int64) for name in ("mask_row", "depths_request")),
        *((name, c_void_p) for name in ("row", "rows", "own", "base", "blocks", "mask", "depths")),
    ]
    layout: CacheLayout
    kept: tuple[Tensor, ...]  # keeps the pointers valid


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "cache", "out", "sinks")),
        *((name, c_int64) for name in ("query_row", "query_head", "out_row", "out_head")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("dtype", "paired", "truncate")),
    ]


_tree_attention = cpu_function("tree_attention", POINTER(AttentionPlan), POINTER(_Layer))


def plan_trees(
    tree: TreeBatch,
    base: Tensor,  # integer [B], context tokens before the root
    block_table: Tensor,  # int32 [B, >= ceil((base + num_nodes) / block_size)]
    layout: CacheLayout,
    num_heads: int,
    window: int | None = None,
    row_starts: Tensor | None = None,  # int64 [B], row of each root; None: contiguous from row 0
) -> AttentionPlan:
    """Plan the verification of trees: each node attends to the context and its ancestors."""
    starts = tree.cu_num_nodes[:-1] if row_starts is None else row_starts
    sizes = tree.num_nodes.to(torch.int64)
    depths = None if window is None else tree.depths.to(torch.int64)
    return _plan(
        tree.ancestors, starts, sizes, sizes, base, block_table, layout, num_heads, window, depths
    )


def plan_branches(
    mask: Tensor,  # bool [B, queries, S]: which of the S scratch nodes each query attends to
    base: Tensor,  # int64 [B], context tokens
    block_table: Tensor,  # int32 [B, >= ceil((base + S) / block_size)]
    layout: CacheLayout,
    num_heads: int,
    window: int | None = None,
    depths: Tensor | None = None,  # int64 [S] or [B, S], of the scratch nodes; for a window
) -> AttentionPlan:
    """Plan one level of a drafter's trees. Query rows are contiguous, request by request.

    After the context, the cache holds the nodes expanded so far, level by level; the queries are
    the newest level, and each attends to its own ancestors.
    """
    batch, queries, size = mask.shape
    starts = queries * torch.arange(batch)
    rows, own = torch.full((batch,), queries), torch.full((batch,), size)
    places = None if depths is None else depths.expand(batch, -1)
    return _plan(mask, starts, rows, own, base, block_table, layout, num_heads, window, places)


def _plan(
    mask: Tensor,  # bool [B, >= rows, >= own keys]
    starts: Tensor,
    rows: Tensor,
    own: Tensor,
    base: Tensor,
    block_table: Tensor,
    layout: CacheLayout,
    num_heads: int,
    window: int | None,
    depths: Tensor | None,
) -> AttentionPlan:
    if layout.head_size % 16 or layout.block_size % 16:
        raise ValueError(
            f"head size {layout.head_size} and block size {layout.block_size} must be multiples of "
            "16; set --block-size to a multiple of 16"
        )
    numbers = torch.stack([t.to(torch.int64) for t in (starts, rows, own, base)])
    mask, blocks = _inner(mask), _inner(block_table)
    plan = AttentionPlan(
        len(base), num_heads, layout.num_kv_heads, layout.head_size, layout.block_size,
        layout.block_stride, window or 0, blocks.stride(0), mask.stride(0), mask.stride(1),
        0 if depths is None else depths.stride(0), *(row.data_ptr() for row in numbers),
        blocks.data_ptr(), mask.data_ptr(), None if depths is None else depths.data_ptr(),
    )  # fmt: skip
    assert mask.dtype == torch.bool and blocks.dtype == torch.int32
    plan.layout, plan.kept = layout, (numbers, blocks, mask, numbers if depths is None else depths)
    return plan


def _inner(tensor: Tensor) -> Tensor:
    """The same values with a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def tree_attention(
    query: Tensor,  # fp32, bf16 or fp16 [rows, num_heads, head_size]; rows may be strided
    kv_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, 2 * head_size], of the plan's layout
    plan: AttentionPlan,
    scale: float,  # factor on the logits
    softcap: float = 0.0,  # logits become softcap * tanh(logits / softcap); 0: no cap
    sinks: Tensor | None = None,  # [num_heads], an additional logit per head, without a value
    out: Tensor | None = None,  # like ``query``; None: allocate it
    *,
    truncate: bool = False,  # bf16 results, not round them, as vLLM does without AVX-512
) -> Tensor:
    """Attend every node to its context and its ancestors; keys and values are in the cache.

    Only rows of the plan are read and written. Returns ``out``. ALiBi is not supported; the layer
    refuses it.
    """
    if kv_cache.dtype != query.dtype:
        raise TypeError(
            f"the KV cache is {kv_cache.dtype} but the queries are {query.dtype}; tree attention "
            "reads only unquantized caches. Start vLLM with --kv-cache-dtype auto."
        )
    if out is None:
        out = torch.empty_like(query)
    assert query.stride(2) == out.stride(2) == 1 and query.shape == out.shape
    assert query.shape[1:] == (plan.heads, plan.dim), query.shape
    paired = plan.layout.isa == "amx" and query.dtype == torch.bfloat16
    if sinks is not None:
        sinks = sinks.float().contiguous()
    layer = _Layer(
        query.data_ptr(), kv_cache.data_ptr(), out.data_ptr(),
        None if sinks is None else sinks.data_ptr(), query.stride(0), query.stride(1),
        out.stride(0), out.stride(1), scale, softcap, CPU_DTYPES[query.dtype], paired, truncate,
    )  # fmt: skip
    _tree_attention(byref(plan), byref(layer))
    return out


def topologies(parents: Tensor, num_nodes: Tensor) -> TreeBatch:
    """`TreeBatch.from_parents` of trees on the host (contiguous), with the exact `max_depth`."""
    batch, width = parents.shape
    words = num_words(width)
    ancestors = torch.empty((batch, width, width), dtype=torch.bool)
    bits = torch.empty((batch, width, words), dtype=torch.int64)
    depths = torch.empty_like(parents)
    max_depth = _tree_topologies(
        parents.data_ptr(), num_nodes.data_ptr(), batch, width, words, ancestors.data_ptr(),
        bits.data_ptr(), depths.data_ptr(),
    )  # fmt: skip
    return TreeBatch(num_nodes, parents, depths, bits, ancestors, max_depth)


_tree_topologies = cpu_function(
    "tree_topologies", c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 3,
    result=c_int64,
)  # fmt: skip


def write_positions(
    positions: Tensor,  # int64 [>= T], written in place
    base: Tensor,  # integer [B]
    tree: TreeBatch,
    first_row: Tensor,  # int64 [B], the row of each root
) -> None:
    """`step.write_node_positions` on the host."""
    base, counts = base.to(torch.int64), tree.num_nodes.to(torch.int64)
    depths = tree.depths.contiguous()
    _tree_positions(
        positions.data_ptr(), base.data_ptr(), first_row.data_ptr(), counts.data_ptr(),
        *depths.shape, depths.data_ptr(),
    )  # fmt: skip


_tree_positions = cpu_function("tree_positions", *[c_void_p] * 4, c_int64, c_int64, c_void_p)
