# mypy: allow-untyped-defs
"""The rules of this package in Triton: all requests in one launch, no host sync.

One program decides one request, as a tree has at most 256 nodes. Whatever compares and counts gives
the same bits as the torch functions of the same names; `typical_path` also does arithmetic, which
agrees up to rounding. No program waits for another and no sum is atomic, so the same logits give
the same verdict on every rank, in every batch.

Every function can be told where to write (``out``, scratch memory), so that nothing is allocated
while a CUDA graph is captured. Tensors are strided in all dimensions but the last. This module
imports Triton, so import it late, where there is a device to run it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_medusa.sampler.path import NO_TOKEN, Path, Verdict
from vllm_medusa.tree.batch import TreeBatch

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_SPLIT = 8192  # token ids of one program in the pass over the vocabulary


def empty_verdict(batch_size: int, max_depth: int, device: torch.device | str) -> Verdict:
    """A verdict to write into, for trees no deeper than ``max_depth``; its values are garbage."""
    tables = torch.empty(2, batch_size, max_depth + 1, dtype=torch.int64, device=device)
    columns = torch.empty(2, batch_size, dtype=torch.int64, device=device)
    return Verdict(Path(tables[0], *columns), tables[1])


def target_verdict(
    tree: TreeBatch, token_ids: Tensor, target_ids: Tensor, out: Verdict | None = None
) -> Verdict:
    """Keep every draft that is the target's own token at its parent: greedy and lossless alike.

    ``token_ids`` and ``target_ids`` are int64 [B, N]; ``target_ids`` holds for each node the token
    that plain decoding would emit after it. That is the argmax for a greedy request. For a sampling
    request it is a draw, made at every node beforehand: a draw is a function of the node's logits,
    the request's seed and the position, so those at nodes off the path change none on it. From
    there on both are the walk of `lossless_walk`, hence one function, and a batch may mix them.
    Equals `greedy_verdict` with ``target_ids`` for the argmax.
    """
    batch, nodes = tree.parents.shape
    out = out or empty_verdict(batch, tree.max_depth, token_ids.device)
    assert token_ids.shape == target_ids.shape == (batch, nodes)
    assert out.output_token_ids.shape == out.path.nodes.shape == (batch, tree.max_depth + 1)
    _walk_kernel[(batch,)](
        *_strided(token_ids),
        *_strided(target_ids),
        *_strided(tree.parents),
        *_strided(tree.num_nodes),
        *_strided(out.path.nodes),
        *_strided(out.path.num_accepted),
        *_strided(out.path.last_node),
        *_strided(out.output_token_ids),
        tree.max_depth,
        BLOCK_N=_block(nodes),
        num_warps=1,  # a reduction within one warp needs no shared memory
    )
    return out


def accept_path(
    tree: TreeBatch, node_accepted: Tensor, score: Tensor | None = None, out: Path | None = None
) -> Path:
    """The longest path of accepted nodes: `path.accept_path`, with ``score`` in fp32."""
    batch, nodes = tree.parents.shape
    out = out or empty_verdict(batch, tree.max_depth, node_accepted.device).path
    assert node_accepted.shape == (batch, nodes) and node_accepted.dtype == torch.bool
    assert score is None or (score.shape == (batch, nodes) and score.dtype == torch.float32)
    assert out.nodes.shape == (batch, tree.max_depth + 1)
    _accept_kernel[(batch,)](
        *_strided(node_accepted),
        *_strided(node_accepted if score is None else score),  # unread where there is no score
        *_strided(tree.num_nodes),
        *_strided(tree.depths),
        *_strided(tree.ancestor_bits),
        *_strided(out.nodes),
        *_strided(out.num_accepted),
        *_strided(out.last_node),
        tree.max_depth,
        HAS_SCORE=score is not None,
        NUM_WORDS=tree.ancestor_bits.shape[2],
        BLOCK_N=_block(nodes),
        BLOCK_D=_block(tree.max_depth + 1),
        num_warps=1,
    )
    return out


def close_path(
    path: Path, token_ids: Tensor, final_token: Tensor, out: Tensor | None = None
) -> Verdict:
    """The verdict of a path: `path.close_path`; ``out`` takes the tokens, int64 [B, D + 1]."""
    out = torch.empty_like(path.nodes) if out is None else out
    batch, columns = path.nodes.shape
    assert out.shape == (batch, columns) and token_ids.shape[0] == batch
    _close_kernel[(batch,)](
        *_strided(path.nodes),
        *_strided(path.num_accepted),
        *_strided(token_ids),
        *_strided(final_token),
        *_strided(out),
        columns,
        BLOCK_D=_block(columns),
        num_warps=1,
    )
    return Verdict(path, out)


class TypicalScratch(NamedTuple):
    """What the kernels of `typical_path` leave for one another."""

    parts: Tensor  # float32 [R, splits, 3], sums over parts of the vocabulary
    node_accepted: Tensor  # bool [B, N]
    score: Tensor  # float32 [B, N]

    @classmethod
    def empty(cls, tree: TreeBatch, logits: Tensor) -> TypicalScratch:
        """Memory for these trees and ``logits`` [R, V]."""
        rows, vocab = logits.shape
        new = logits.new_empty
        return cls(
            new((rows, triton.cdiv(vocab, _SPLIT), 3), dtype=torch.float32),
            new(tree.parents.shape, dtype=torch.bool),
            new(tree.parents.shape, dtype=torch.float32),
        )


def typical_path(
    tree: TreeBatch,
    token_ids: Tensor,
    logits: Tensor,
    row_of_node: Tensor,
    epsilon: Tensor,
    delta: Tensor,
    out: Path | None = None,
    scratch: TypicalScratch | None = None,
) -> Path:
    """The longest path of plausible nodes from logits, which are read once.

    `typical.typical_path` of the probabilities ``logits[row_of_node].softmax(-1)``, up to rounding.

    Args:
        tree: The trees of B requests, N nodes each.
        token_ids: int64 [B, N], negative where there is no draft.
        logits: fp32, fp16 or bf16 [R, V], after temperature and truncation (-inf).
        row_of_node: int64 [B, N], the logits' row of each node; what padding has is not read.
        epsilon: fp32 [B].
        delta: fp32 [B].
        out: Where to write the path.
        scratch: Memory to use.

    """
    batch, nodes = tree.parents.shape
    rows, vocab = logits.shape
    scratch = scratch or TypicalScratch.empty(tree, logits)
    splits = triton.cdiv(vocab, _SPLIT)
    assert token_ids.shape == row_of_node.shape == scratch.score.shape == (batch, nodes)
    assert epsilon.shape == delta.shape == (batch,)
    assert scratch.parts.is_contiguous() and scratch.parts.shape == (rows, splits, 3)
    _vocabulary_kernel[(rows, splits)](
        *_strided(logits), vocab, scratch.parts, SPLIT=_SPLIT, num_warps=8
    )
    _plausible_kernel[(batch,)](
        *_strided(token_ids),
        *_strided(logits),
        *_strided(row_of_node),
        scratch.parts,
        splits,
        *_strided(epsilon),
        *_strided(delta),
        *_strided(tree.parents),
        *_strided(tree.num_nodes),
        *_strided(scratch.node_accepted),
        *_strided(scratch.score),
        tree.max_depth,
        BLOCK_S=_block(splits),
        BLOCK_N=_block(nodes),
        num_warps=8,
    )
    return accept_path(tree, scratch.node_accepted, scratch.score, out)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _strided(tensor: Tensor) -> tuple[Tensor | int, ...]:
    """A tensor and its strides but the last, which is 1."""
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor, *tensor.stride()[:-1]


@triton.jit
def _walk_kernel(
    token_ids_ptr,  # int64 [B, N]
    token_ids_b,
    target_ids_ptr,  # int64 [B, N]
    target_ids_b,
    parents_ptr,  # int64 [B, N]
    parents_b,
    num_nodes_ptr,  # integer [B]
    nodes_ptr,  # out, int64 [B, D + 1]
    nodes_b,
    num_accepted_ptr,  # out, int64 [B]
    last_node_ptr,  # out, int64 [B]
    output_ptr,  # out, int64 [B, D + 1]
    output_b,
    max_depth,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    drafted = (index > 0) & (index < tl.load(num_nodes_ptr + request).to(tl.int32))
    # The root and padding get the parent -1, so they are nobody's children.
    parents = tl.load(parents_ptr + request * parents_b + index, mask=drafted, other=-1)
    tokens = tl.load(token_ids_ptr + request * token_ids_b + index, mask=drafted, other=-1)
    node = 0
    accepted = 0
    walking = 1
    for level in range(max_depth + 1):
        token = tl.load(target_ids_ptr + request * target_ids_b + node)
        tl.store(nodes_ptr + request * nodes_b + level, node)
        tl.store(output_ptr + request * output_b + level, tl.where(walking == 1, token, _NO_TOKEN))
        hits = (parents == node) & (tokens == token) & (walking == 1)
        child = tl.min(tl.where(hits, index, BLOCK_N), 0)  # the first of equal siblings
        walking = (child < BLOCK_N).to(tl.int32)
        node = tl.where(walking == 1, child, node)
        accepted += walking
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(last_node_ptr + request, node)


@triton.jit
def _accept_kernel(
    accepted_ptr,  # bool [B, N]
    accepted_b,
    score_ptr,  # float32 [B, N] if HAS_SCORE
    score_b,
    num_nodes_ptr,  # integer [B]
    depths_ptr,  # int64 [B, N]
    depths_b,
    bits_ptr,  # int64 [B, N, W]
    bits_b,
    bits_n,
    nodes_ptr,  # out, int64 [B, D + 1]
    nodes_b,
    num_accepted_ptr,  # out, int64 [B]
    last_node_ptr,  # out, int64 [B]
    max_depth,
    HAS_SCORE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    exists = index < tl.load(num_nodes_ptr + request).to(tl.int32)
    accepted = tl.load(accepted_ptr + request * accepted_b + index, mask=exists, other=0)
    stops = exists & (index > 0) & (accepted.to(tl.int32) == 0)
    bit = tl.full([BLOCK_N], 1, tl.int64) << (index % 64).to(tl.int64)
    bits_ptr += request * bits_b
    reached = exists
    for word in tl.static_range(NUM_WORDS):  # a node is reached if none of its ancestors stops
        stop_bits = tl.sum(tl.where(stops & (index // 64 == word), bit, 0), 0)
        attends = tl.load(bits_ptr + index * bits_n + word, mask=exists, other=0)
        reached = reached & ((attends & stop_bits) == 0)
    depths = tl.load(depths_ptr + request * depths_b + index, mask=exists, other=0).to(tl.int32)
    reached_depth = tl.where(reached, depths, -1)
    deepest = tl.max(reached_depth, 0)
    best = reached_depth == deepest
    if HAS_SCORE:
        score = tl.load(score_ptr + request * score_b + index, mask=exists, other=0.0)
        score = tl.where(best & (score == score), score, float("-inf"))  # NaN is lowest
        score = tl.where(score == float("inf"), _LARGEST, score)  # as nan_to_num has it
        best = best & (score == tl.max(score, 0))
    last = tl.min(tl.where(best, index, BLOCK_N), 0)

    # One ancestor per depth, the node included: each writes itself into the column of its depth.
    nodes_ptr += request * nodes_b
    for word in tl.static_range(NUM_WORDS):
        attends = tl.load(bits_ptr + last * bits_n + word)
        on_path = exists & (index // 64 == word) & ((attends & bit) != 0) & (depths <= max_depth)
        tl.store(nodes_ptr + depths, index, mask=on_path)
    column = tl.arange(0, BLOCK_D)
    tl.store(nodes_ptr + column, last, mask=(column > deepest) & (column <= max_depth))
    tl.store(num_accepted_ptr + request, deepest)
    tl.store(last_node_ptr + request, last)


@triton.jit
def _close_kernel(
    nodes_ptr,  # int64 [B, D + 1]
    nodes_b,
    num_accepted_ptr,  # int64 [B]
    token_ids_ptr,  # int64 [B, N]
    token_ids_b,
    final_ptr,  # int64 [B]
    output_ptr,  # out, int64 [B, D + 1]
    output_b,
    columns,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    end = tl.load(num_accepted_ptr + request).to(tl.int32)
    inside = column < end
    node = tl.load(nodes_ptr + request * nodes_b + column + 1, mask=inside, other=0)
    token = tl.load(token_ids_ptr + request * token_ids_b + node, mask=inside, other=_NO_TOKEN)
    token = tl.where(column == end, tl.load(final_ptr + request), token)
    tl.store(output_ptr + request * output_b + column, token, mask=column < columns)


@triton.jit
def _vocabulary_kernel(
    logits_ptr,  # float [R, V]
    logits_r,
    vocab_size,
    parts_ptr,  # out, float32 [R, splits, 3]
    SPLIT: tl.constexpr,
):
    # What a part of a row adds to its softmax and entropy: its largest logit m, the sum of
    # w = exp(x - m), and the sum of w * (x - m). All of a part may be -inf.
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column = split * SPLIT + tl.arange(0, SPLIT)
    inside = column < vocab_size
    logits = tl.load(logits_ptr + row * logits_r + column, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    top = tl.max(logits, 0)
    distance = logits - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(distance)  # NaN from NaN and from +inf, and so are the sums
    parts_ptr += (row * tl.num_programs(1) + split) * 3
    tl.store(parts_ptr, top)
    tl.store(parts_ptr + 1, tl.sum(weight, 0))
    tl.store(parts_ptr + 2, tl.sum(tl.where(weight == 0.0, 0.0, weight * distance), 0))


@triton.jit
def _plausible_kernel(
    token_ids_ptr,  # int64 [B, N]
    token_ids_b,
    logits_ptr,  # float [R, V]
    logits_r,
    row_of_node_ptr,  # int64 [B, N]
    row_of_node_b,
    parts_ptr,  # float32 [R, splits, 3]
    splits,
    epsilon_ptr,  # float32 [B]
    delta_ptr,  # float32 [B]
    parents_ptr,  # int64 [B, N]
    parents_b,
    num_nodes_ptr,  # integer [B]
    accepted_ptr,  # out, bool [B, N]
    accepted_b,
    score_ptr,  # out, float32 [B, N]
    score_b,
    max_depth,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    exists = index < tl.load(num_nodes_ptr + request).to(tl.int32)
    drafted = exists & (index > 0)
    parents = tl.load(parents_ptr + request * parents_b + index, mask=drafted, other=0)
    tokens = tl.load(token_ids_ptr + request * token_ids_b + index, mask=drafted, other=-1)
    drafted = drafted & (tokens >= 0)
    row = tl.load(row_of_node_ptr + request * row_of_node_b + parents, mask=drafted, other=0)

    # Bring the parts of the parent's row to one maximum and add: total = sum of exp(x - top).
    split = tl.arange(0, BLOCK_S)
    parts_ptrs = parts_ptr + (row[:, None] * splits + split[None, :]) * 3  # [BLOCK_N, BLOCK_S]
    present = drafted[:, None] & (split < splits)[None, :]
    tops = tl.load(parts_ptrs, mask=present, other=float("-inf"))
    weights = tl.load(parts_ptrs + 1, mask=present, other=0.0)
    sums = tl.load(parts_ptrs + 2, mask=present, other=0.0)
    top = tl.max(tops, 1)  # [BLOCK_N]
    base = tl.where(top == float("-inf"), 0.0, top)
    distance = tops - base[:, None]
    scale = tl.exp(distance)
    total = tl.sum(weights * scale, 1)
    sums = tl.where(scale == 0.0, 0.0, (sums + weights * distance) * scale)
    entropy = tl.log(total) - tl.sum(sums, 1) / total

    bar = tl.load(delta_ptr + request) * tl.exp(-entropy)
    bar = tl.minimum(tl.load(epsilon_ptr + request), bar)
    logit = tl.load(logits_ptr + row * logits_r + tokens, mask=drafted, other=0.0).to(tl.float32)
    p = tl.exp(logit - base) / total
    accepted = drafted & (p > bar)  # never where the row has a NaN: the total is NaN
    log_p = tl.log(tl.where(accepted, p, 1.0))
    score = tl.zeros([BLOCK_N], tl.float32)
    parents = parents.to(tl.int32)
    for _ in range(max_depth):  # root to leaf, so that equal paths have equal sums
        score = tl.where(index > 0, tl.gather(score, parents, 0) + log_p, 0.0)
    tl.store(accepted_ptr + request * accepted_b + index, accepted, mask=exists)
    tl.store(score_ptr + request * score_b + index, score, mask=exists)
