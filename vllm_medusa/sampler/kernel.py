# mypy: allow-untyped-defs
"""Acceptance in Triton; see `launch` for the rules.

One program handles one request, because a tree has at most 256 nodes. Strides change with the batch
and with the nodes of its widest tree, and verdicts have arbitrary addresses: neither may
trigger a recompilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_medusa.sampler.path import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(
    do_not_specialize=("token_ids_b", "target_ids_b", "parents_b", "nodes_b", "output_b"),
    do_not_specialize_on_alignment=("nodes_ptr", "num_accepted_ptr", "last_node_ptr", "output_ptr"),
)
def walk(
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
    """Walk down from the root, one level at a time: the first child with the target's own token."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    drafted = (index > 0) & (index < tl.load(num_nodes_ptr + request).to(tl.int32))
    # The root and padding get the parent -1, so they are not children of any node.
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
        child = tl.min(tl.where(hits, index, BLOCK_N), 0)  # the first sibling if equal
        walking = (child < BLOCK_N).to(tl.int32)
        node = tl.where(walking == 1, child, node)
        accepted += walking
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(last_node_ptr + request, node)


@triton.jit
def vocabulary(
    logits_ptr,  # float [R, V]
    logits_r,
    vocab_size,
    parts_ptr,  # out, float32 [R, splits, 3]
    SPLIT: tl.constexpr,
):
    """Partial sums of a row's softmax and entropy; a part may be all -inf.

    They are its largest logit m, the sum of w = exp(x - m), and the sum of w * (x - m).
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column = split * SPLIT + tl.arange(0, SPLIT)
    inside = column < vocab_size
    logits = tl.load(logits_ptr + row * logits_r + column, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    top = tl.max(logits, 0)
    distance = logits - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(distance)  # NaN from NaN and +inf, also in the sums
    parts_ptr += (row * tl.num_programs(1) + split) * 3
    tl.store(parts_ptr, top)
    tl.store(parts_ptr + 1, tl.sum(weight, 0))
    tl.store(parts_ptr + 2, tl.sum(tl.where(weight == 0.0, 0.0, weight * distance), 0))


@triton.jit(
    do_not_specialize=("token_ids_b", "row_of_node_b", "parents_b", "accepted_b", "score_b")
)
def plausible(
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
    doublings,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Typical acceptance of each node by its parent's distribution, and path log-probabilities."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    exists = index < tl.load(num_nodes_ptr + request).to(tl.int32)
    drafted = exists & (index > 0)
    parents = tl.load(parents_ptr + request * parents_b + index, mask=drafted, other=0)
    tokens = tl.load(token_ids_ptr + request * token_ids_b + index, mask=drafted, other=-1)
    drafted = drafted & (tokens >= 0)
    row = tl.load(row_of_node_ptr + request * row_of_node_b + parents, mask=drafted, other=0)

    # Rescale the parts of the parent's row to one maximum and add: total = sum of exp(x - top).
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

    threshold = tl.load(delta_ptr + request) * tl.exp(-entropy)
    threshold = tl.minimum(tl.load(epsilon_ptr + request), threshold)
    logit = tl.load(logits_ptr + row * logits_r + tokens, mask=drafted, other=0.0).to(tl.float32)
    p = tl.exp(logit - base) / total
    accepted = drafted & (p > threshold)  # never if the row has a NaN: the total is NaN
    score = tl.log(tl.where(accepted, p, 1.0))  # 0 at the root, its own parent here
    above = parents.to(tl.int32)
    for _ in range(doublings):  # pairwise sum along the path; identical for equal paths
        score += tl.gather(score, above, 0)
        above = tl.gather(above, above, 0)
    tl.store(accepted_ptr + request * accepted_b + index, accepted, mask=exists)
    tl.store(score_ptr + request * score_b + index, score, mask=exists)
