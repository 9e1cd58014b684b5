"""Caches with scattered tokens, one offset per element (vLLM's CPU caches)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from vllm_medusa.kv.compaction import accepted_moves, copy_slots


class Packing(Protocol):
    """Token layout of a cache; equal layouts share their offsets."""

    def __hash__(self) -> int: ...

    def flat(self, kv_cache: Tensor) -> Tensor:
        """View all elements of the cache as one dimension."""

    def element_offsets(self, slots: Tensor) -> Tensor:
        """Offsets of all elements of the tokens in ``slots`` [...]: int64 [..., any]."""


def compact_packed(
    caches: Iterable[tuple[Tensor, Packing]],
    slots: Tensor,
    path_nodes: Tensor,
    num_accepted: Tensor,
) -> None:
    """Move every accepted node's KV to the slot of its depth; `layers.compact_layers`.

    A cache that is passed twice is moved once. Nothing is read if no token has to move, which is
    checked on the host.
    """
    src, dst = accepted_moves(slots, path_nodes, num_accepted)  # [B, D] each
    moved = src != dst
    if not bool(moved.any()):
        return
    moves = torch.stack((src[moved], dst[moved])).to(torch.int64)
    offsets: dict[Packing, Tensor] = {}  # [2, elements]
    done: set[int] = set()  # layers that share one cache
    for cache, packing in caches:
        if cache.data_ptr() in done:
            continue
        done.add(cache.data_ptr())
        if packing not in offsets:
            offsets[packing] = packing.element_offsets(moves).flatten(1)
        copy_slots(packing.flat(cache), *offsets[packing])
