# mypy: allow-untyped-defs
"""Head logits to node tokens in Triton: `propose` and `propose_sharded`, bitwise equal.

The vocabulary is split into parts. A program converts a part of a head's row into the int64 keys
of `sharded`, in registers, and takes the maximum k times. Parts are then merged just as ranks
are, so there are two kernels, and one more for the last merge, which writes tokens to the nodes:

    one rank     parts -> fill
    more ranks   parts -> merge -> (all-gather) -> fill

Keys are computed from the logits' bits alone, so nothing can be rounded or flushed to zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_medusa.proposer import check_fits
from vllm_medusa.proposer.sharded import NO_CANDIDATE, AllGather, VocabShard
from vllm_medusa.tree.batch import TreeTensors

_NO_CANDIDATE = tl.constexpr(NO_CANDIDATE)
_NAN = tl.constexpr(0x7FC00000)  # as float32 bits
_PARTS = (2048, 4096, 8192)  # ids in a part
_CANDIDATES = 4096  # merged by one program, if the largest part allows it


def propose(
    logits: Tensor, tree: TreeTensors, token_map: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Fill the tree: logits [B, >= max_depth, V_draft] -> int64 [B, N]; `proposer.propose`."""
    vocab = logits.shape[2]
    width = check_fits(tree, logits.shape[1], vocab)
    parts = _best_of_parts(logits[:, : tree.max_depth], width, VocabShard(0, vocab, vocab))
    return fill_tree(parts, tree, token_map, out)


def propose_sharded(
    logits: Tensor,
    tree: TreeTensors,
    shard: VocabShard,
    all_gather: AllGather,
    token_map: Tensor | None = None,
) -> Tensor:
    """Fill the tree from a rank's logits [B, >= max_depth, V_shard]; `sharded.propose_sharded`."""
    width = check_fits(tree, logits.shape[1], shard.vocab_size)
    keys = local_topk(logits[:, : tree.max_depth], width, shard)
    return fill_tree(all_gather(keys), tree, token_map)


def local_topk(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    """The k best candidates of a shard: [B, D, V_shard] -> keys int64 [B, D, k]."""
    return merge_topk(_best_of_parts(logits, k, shard), k)


def merge_topk(keys: Tensor, k: int) -> Tensor:
    """The k best of all ranks' candidates: int64 [R, B, D, k'] -> [B, D, k]."""
    ranks, batch, heads, given = keys.shape
    out = keys.new_empty((batch, heads, k))
    assert keys.is_contiguous()
    _merge_kernel[(batch * heads,)](
        keys,
        ranks,
        given,
        out,
        k,
        BLOCK=_block(ranks * given),
        num_warps=_warps(ranks * given),
    )
    return out


def fill_tree(
    keys: Tensor, tree: TreeTensors, token_map: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Merge all ranks' candidates, int64 [R, B, D, k], and put the best at the nodes: [B, N]."""
    ranks, batch, heads, given = keys.shape
    out = keys.new_empty((batch, tree.num_nodes)) if out is None else out
    assert heads == tree.max_depth and keys.is_contiguous()
    assert out.shape == (batch, tree.num_nodes) and out.stride(1) == 1
    _fill_kernel[(batch, heads)](
        keys,
        ranks,
        given,
        max(tree.head_widths),
        tree.depths,
        tree.ranks,
        out if token_map is None else token_map,  # not read without a map
        out,
        out.stride(0),
        tree.num_nodes,
        HAS_MAP=token_map is not None,
        BLOCK=_block(ranks * given),
        BLOCK_N=_block(tree.num_nodes),
        num_warps=_warps(ranks * given),
    )
    return out


def _best_of_parts(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    """The k best candidates of every part of the vocabulary: int64 [parts, B, D, k]."""
    batch, heads, vocab = logits.shape
    part = _part_size(vocab, k)
    parts = triton.cdiv(vocab, part)
    out = logits.new_empty((parts, batch, heads, k), dtype=torch.int64)
    assert shard.num_ids <= vocab and logits.stride(2) == 1
    is_bf16 = logits.dtype == torch.bfloat16
    _parts_kernel[(batch * heads, parts)](
        logits.view(torch.int16) if is_bf16 else logits,
        logits.stride(0),
        logits.stride(1),
        heads,
        shard.num_ids,
        shard.first_id,
        out,
        k,
        IS_BF16=is_bf16,
        PART=part,
        num_warps=_warps(part),
    )
    return out


def _part_size(vocab_size: int, k: int) -> int:
    """The smallest part whose number of candidates one program can merge."""
    for part in _PARTS:
        if triton.cdiv(vocab_size, part) * k <= _CANDIDATES:
            return part
    return _PARTS[-1]


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _warps(size: int) -> int:
    return min(8, max(1, _block(size) // 512))  # at most 16 keys per thread, up to 4096 keys


@triton.jit
def _parts_kernel(
    logits_ptr,  # float16 or float32 [B, D, V], or the int16 bits of bfloat16
    logits_b,
    logits_d,
    heads,
    num_ids,
    first_id,
    keys_ptr,  # out, int64 [parts, B, D, k]
    k,
    IS_BF16: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += (row // heads).to(tl.int64) * logits_b + (row % heads).to(tl.int64) * logits_d
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < num_ids
    logits = tl.load(logits_ptr + column, mask=inside, other=0)
    if IS_BF16:
        bits = logits.to(tl.int32) << 16
    else:
        bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN, bits)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)  # -0.0 equals 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) - (first_id + column).to(tl.int64)
    keys = tl.where(inside, keys, _NO_CANDIDATE)
    keys_ptr += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + row) * k
    for rank in range(k):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + rank, best)
        keys = tl.where(keys == best, _NO_CANDIDATE, keys)  # no two candidates are equal


@triton.jit
def _load_candidates(keys_ptr, row, rows, ranks, given, BLOCK: tl.constexpr):
    candidate = tl.arange(0, BLOCK)
    rank = (candidate // given).to(tl.int64)
    return tl.load(
        keys_ptr + (rank * rows + row) * given + candidate % given,
        mask=candidate < ranks * given,
        other=_NO_CANDIDATE,
    )


@triton.jit
def _merge_kernel(
    keys_ptr,  # int64 [R, B, D, given]
    ranks,
    given,
    out_ptr,  # out, int64 [B, D, k]
    k,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    keys = _load_candidates(keys_ptr, row, tl.num_programs(0), ranks, given, BLOCK)
    for place in range(k):
        best = tl.max(keys, 0)
        tl.store(out_ptr + row * k + place, best)
        keys = tl.where(keys == best, _NO_CANDIDATE, keys)


@triton.jit
def _fill_kernel(
    keys_ptr,  # int64 [R, B, D, given]
    ranks,
    given,
    width,
    depths_ptr,  # int64 [N]
    ranks_ptr,  # int64 [N]
    token_map_ptr,  # int64 [V_draft] if HAS_MAP
    out_ptr,  # out, int64 [B, N]
    out_b,
    num_nodes,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row = request * heads + head
    keys = _load_candidates(keys_ptr, row, tl.num_programs(0) * heads, ranks, given, BLOCK)
    node = tl.arange(0, BLOCK_N)
    exists = node < num_nodes
    mine = exists & (tl.load(depths_ptr + node, mask=exists, other=0) == head + 1)
    choice = tl.load(ranks_ptr + node, mask=exists, other=0)
    out_ptr += request * out_b
    tl.store(out_ptr + node, tl.zeros([BLOCK_N], tl.int64), mask=node + head == 0)
    for place in range(width):
        best = tl.max(keys, 0)
        token = (-best) & 0xFFFFFFFF
        if HAS_MAP:
            token = tl.load(token_map_ptr + token)
        tl.store(out_ptr + node, token, mask=mine & (choice == place))
        keys = tl.where(keys == best, _NO_CANDIDATE, keys)
