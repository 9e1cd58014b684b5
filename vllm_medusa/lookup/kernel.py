# mypy: allow-untyped-defs
"""Lookup in Triton: the search through the texts of all requests in one launch.

One program searches one request's text, a block of places at a time. Most blocks hold no place
that agrees over two tokens, so a block is left as soon as none of its places does any more.
Texts grow from step to step and lie anywhere in their table: neither may make another kernel to
compile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_medusa.lookup.search import LONGEST, SHORTEST

_BLOCK = 4096  # places of a text that are compared at once


def continuations(
    texts: Tensor, slots: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Search the texts of a batch: `on_device.continuations`."""
    assert texts.stride(1) == 1 and slots.is_contiguous() and lengths.is_contiguous()
    matched = torch.empty_like(lengths)
    found = lengths.new_empty((len(slots), count))
    search[(len(slots),)](
        texts,
        texts.stride(0),
        slots,
        lengths,
        matched,
        found,
        count,
        LONGEST=LONGEST,
        SHORTEST=SHORTEST,
        BLOCK=_BLOCK,
        BLOCK_C=max(16, triton.next_power_of_2(count)),
        num_warps=8,
    )
    return matched, found


@triton.jit(
    do_not_specialize=("texts_s", "count"),
    do_not_specialize_on_alignment=(
        "texts_ptr",
        "slots_ptr",
        "lengths_ptr",
        "matched_ptr",
        "found_ptr",
    ),
)
def search(
    texts_ptr,  # integer [S, L]
    texts_s,
    slots_ptr,  # int64 [B]
    lengths_ptr,  # int64 [B]
    matched_ptr,  # out, int64 [B]
    found_ptr,  # out, int64 [B, count]
    count,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The place that agrees with the text's end over most tokens, the latest of equals."""
    request = tl.program_id(0).to(tl.int64)
    texts_ptr += tl.load(slots_ptr + request).to(tl.int64) * texts_s
    length = tl.load(lengths_ptr + request).to(tl.int32)
    last = length - 1
    lane = tl.arange(0, BLOCK)
    matched = 0
    start = 0
    for first in range(0, last, BLOCK):
        place = first + lane
        same = place < last  # [BLOCK], whether all tokens up to `back` agree
        agree = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = 1
        while (back < LONGEST) & (going > 0):  # no place agrees beyond the text's first token
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
    is_found = matched >= SHORTEST
    matched = tl.where(is_found, matched, 0)
    start = tl.where(is_found, start, 0)
    column = tl.arange(0, BLOCK_C)
    inside = column < count
    source = start + column % tl.maximum(length - start, 1)  # behind its end in a circle
    token = tl.load(texts_ptr + source, mask=inside, other=0)
    tl.store(matched_ptr + request, matched)
    tl.store(found_ptr + request * count + column, token, mask=inside)
