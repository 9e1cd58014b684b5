# mypy: allow-untyped-defs
"""Lookup in Triton: one launch to search all requests' texts, one to join their trees.

One program searches one request's text, a block of positions at a time; a block is abandoned as
soon as no position matches. One program joins one request's tree and chain; their nodes, at most
512, are sorted by counting the nodes before each. Text lengths and addresses change from step to
step; neither may trigger a recompilation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_medusa.lookup.search import AGREEMENTS, MAX_MATCH, WINDOW
from vllm_medusa.tree.draft_trees import FROM_BOTH, FROM_LOOKUP, DraftTrees

_BLOCK = 4096  # text positions compared at once
_FROM_BOTH, _FROM_LOOKUP = tl.constexpr(FROM_BOTH), tl.constexpr(FROM_LOOKUP)


def continuations(
    texts: Tensor, rows: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`search.continuations`."""
    assert texts.stride(1) == 1 and rows.is_contiguous() and lengths.is_contiguous()
    matched = torch.empty_like(lengths)
    found, agreement = lengths.new_empty((2, len(rows), count))
    search_kernel[(len(rows),)](
        texts,
        texts.stride(0),
        rows,
        lengths,
        matched,
        found,
        agreement,
        count,
        MAX_MATCH=MAX_MATCH,
        AGREEMENTS=AGREEMENTS,
        WINDOW=WINDOW,
        BLOCK=_BLOCK,
        BLOCK_C=max(16, triton.next_power_of_2(count)),
        num_warps=8,
    )
    return matched, found, agreement


def join(trees: DraftTrees, chain: Tensor, log_survival: Tensor, levels: int) -> DraftTrees:
    """`search.join`."""
    (batch, nodes), size = trees.parents.shape, chain.shape[1]
    own = trees.token_ids, trees.parents, trees.log_survival, trees.source
    given = (*own, chain, log_survival)
    assert all(each.stride(1) == 1 for each in given)
    out = DraftTrees(*(each.new_empty((batch, nodes)) for each in own))
    block = max(16, triton.next_power_of_2(nodes + size))
    join_kernel[(batch,)](
        *(part for each in given for part in (each, each.stride(0))),
        log_survival.new_empty((batch, block)),
        out.token_ids,
        out.parents,
        out.log_survival,
        out.source,
        nodes,
        size,
        min(levels, size),
        BLOCK=block,
        num_warps=8,
    )
    return out


@triton.jit(
    do_not_specialize=("texts_s", "count"),
    do_not_specialize_on_alignment=(
        "texts_ptr",
        "rows_ptr",
        "lengths_ptr",
        "matched_ptr",
        "found_ptr",
        "agreement_ptr",
    ),
)
def search_kernel(
    texts_ptr,  # integer [rows, L]
    texts_s,
    rows_ptr,  # int64 [B]
    lengths_ptr,  # int64 [B]
    matched_ptr,  # out, int64 [B]
    found_ptr,  # out, int64 [B, count]
    agreement_ptr,  # out, int64 [B, count]
    count,
    MAX_MATCH: tl.constexpr,
    AGREEMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The longest match of the text's end, the latest if several, and its agreement."""
    request = tl.program_id(0).to(tl.int64)
    texts_ptr += tl.load(rows_ptr + request).to(tl.int64) * texts_s
    length = tl.load(lengths_ptr + request).to(tl.int32)
    last = length - 1
    lane = tl.arange(0, BLOCK)
    matched = 0
    start = 0
    for first in range(0, last, BLOCK):
        place = first + lane
        same = place < last  # [BLOCK], whether all tokens up to `back` match
        agree = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = 1
        while (back < MAX_MATCH) & (going > 0):  # no position matches beyond the text's first token
            same = same & (place >= back)
            before = tl.load(texts_ptr + (place - back), mask=same, other=0)
            same = same & (before == tl.load(texts_ptr + (last - back)))
            agree += same.to(tl.int32)
            going = tl.max(same.to(tl.int32), 0)
            back += 1
        best = tl.max(agree * BLOCK + lane, 0)
        better = best // BLOCK >= matched
        matched = tl.where(better, best // BLOCK, matched)
        start = tl.where(better, first + best % BLOCK + 1, start)
    start = tl.where(matched > 0, start, 0)
    column = tl.arange(0, BLOCK_C)
    inside = column < count
    source = start + column % tl.maximum(length - start, 1)  # wraps around at the end
    token = tl.load(texts_ptr + source, mask=inside, other=0)
    tl.store(matched_ptr + request, matched)
    tl.store(found_ptr + request * count + column, token, mask=inside)

    agreed = tl.zeros([BLOCK_C], tl.int32)  # occurrences by depth: followed by the same token,
    of = tl.zeros([BLOCK_C], tl.int32)  # and by any
    for first in range(tl.maximum(last - WINDOW, 0), last, BLOCK):
        place = first + lane
        same = place < last  # [BLOCK], whether it is an occurrence, and all tokens so far follow
        same = same & (tl.load(texts_ptr + place, mask=same, other=0) == tl.load(texts_ptr + last))
        depth = 0
        going = tl.max(same.to(tl.int32), 0)
        while (depth < count) & (going > 0):
            place += 1
            same = same & (place <= last)
            here = column == depth
            of += tl.where(here, tl.sum(same.to(tl.int32), 0), 0)
            next_one = tl.load(texts_ptr + start + depth % tl.maximum(length - start, 1))
            same = same & (tl.load(texts_ptr + place, mask=same, other=0) == next_one)
            going = tl.sum(same.to(tl.int32), 0)
            agreed += tl.where(here, going, 0)
            depth += 1
    agreement = AGREEMENTS * agreed // (of + 2)
    tl.store(agreement_ptr + request * count + column, agreement, mask=inside)


@triton.jit(
    do_not_specialize=(
        *("tokens_b", "parents_b", "values_b", "source_b", "chain_b", "survival_b"),
        *("nodes", "size", "levels"),
    ),
    do_not_specialize_on_alignment=(
        *("tokens_ptr", "parents_ptr", "values_ptr", "source_ptr", "chain_ptr", "survival_ptr"),
        *("scratch_ptr", "tokens_out", "parents_out", "values_out", "source_out"),
    ),
)
def join_kernel(
    tokens_ptr,  # int64 [B, N]
    tokens_b,
    parents_ptr,  # int64 [B, N]
    parents_b,
    values_ptr,  # float32 [B, N]
    values_b,
    source_ptr,  # int64 [B, N]
    source_b,
    chain_ptr,  # int64 [B, D]
    chain_b,
    survival_ptr,  # float32 [B, D], log-survivals of the chain
    survival_b,
    scratch_ptr,  # float32 [B, BLOCK]
    tokens_out,  # [B, N] each
    parents_out,
    values_out,
    source_out,
    nodes,  # N
    size,  # D
    levels,
    BLOCK: tl.constexpr,
):
    """The nodes of a tree and of a chain below its root, best first, without duplicates."""
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * tokens_b
    parents_ptr += request * parents_b
    chain_ptr += request * chain_b
    survival_ptr += request * survival_b
    index = tl.arange(0, BLOCK)  # tree nodes, then chain nodes
    place = index - nodes
    own = index < nodes
    of_chain = (place >= 0) & (place < size)
    tokens = tl.load(tokens_ptr + index, mask=own, other=-1)
    tokens = tl.where(own, tokens, tl.load(chain_ptr + place, mask=of_chain, other=-1))
    parents = tl.load(parents_ptr + index, mask=own, other=-1).to(tl.int32)
    values = tl.load(values_ptr + request * values_b + index, mask=own, other=float("-inf"))
    source = tl.load(source_ptr + request * source_b + index, mask=own, other=_FROM_LOOKUP)

    at = 0  # last tree node shared with the chain
    shared = 0
    going = 1
    for level in range(levels):
        survival = tl.load(survival_ptr + level)
        same = own & (parents == at) & (tokens == tl.load(chain_ptr + level))
        hit = tl.min(tl.where(same & (values > float("-inf")), index, BLOCK), 0)
        going = going * (hit < BLOCK).to(tl.int32) * (survival > float("-inf")).to(tl.int32)
        at = tl.where(going > 0, hit, at)
        here = (index == at) & (going > 0)
        values = tl.where(here, tl.maximum(values, survival), values)
        source = tl.where(here, _FROM_BOTH, source)
        shared += going

    below = of_chain & (place >= shared)
    values = tl.where(below, tl.load(survival_ptr + place, mask=below, other=0.0), values)
    parents = tl.where(of_chain, tl.where(place == shared, at, index - 1), parents)
    scratch_ptr += request * BLOCK
    tl.store(scratch_ptr + index, values)
    tl.debug_barrier()
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, 16):
        other = first + tl.arange(0, 16)
        others = tl.load(scratch_ptr + other)
        before = others[None, :] > values[:, None]
        tie = others[None, :] == values[:, None]
        before = before | (tie & (other[None, :] < index[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)

    above = tl.gather(rank, tl.maximum(parents, 0), 0)
    above = tl.where(above < nodes, above, 0)
    above = tl.where(rank == 0, -1, above)
    out = request * nodes + rank
    kept = rank < nodes
    tl.store(tokens_out + out, tl.where(own, tokens, tl.maximum(tokens, 0)), mask=kept)
    tl.store(parents_out + out, above.to(tl.int64), mask=kept)
    tl.store(values_out + out, values, mask=kept)
    tl.store(source_out + out, source, mask=kept)
