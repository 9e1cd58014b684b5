"""Compaction: move the KV of the accepted path to the slots that plain decoding would use.

Scoring leaves node i of a request in slot ``slots[i]``, in node order after the context. The
accepted node of depth d belongs in ``slots[d]``; slots after the path hold garbage to be
overwritten. Parents come first, so a node never moves to a larger index:

    slots                 20    21    22    23    24    25
    scored node            0     1     2     3     4     5
    accepted path 0 2 5
    after compaction       0     2     5     -     -     -      moves 22 -> 21, 25 -> 22

Slot 22 is read and written, so all reads come before all writes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepted_moves(
    slots: Tensor, path_nodes: Tensor, num_accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """(src, dst), int64 [B, D] each: column d - 1 has the slots read and written for depth d.

    ``slots`` is int64 [B, N]; ``path_nodes`` int64 [B, D + 1] and ``num_accepted`` int64 [B] come
    from a `Path`. If nothing was accepted, both are the root's slot, so that padding in
    ``slots`` is never touched; a destination appears twice only in such no-op moves.
    """
    num_moves = path_nodes.shape[1] - 1
    depth = torch.arange(1, num_moves + 1, device=slots.device)
    moved = depth <= num_accepted.unsqueeze(1)  # [B, D]
    root = slots[:, :1]
    src = torch.where(moved, slots.gather(1, path_nodes[:, 1:]), root)
    dst = torch.where(moved, slots[:, depth.clamp(max=slots.shape[1] - 1)], root)
    return src, dst


def copy_slots(
    cache: Tensor, src: Tensor, dst: Tensor, slot_dims: int | tuple[int, int] = 0
) -> None:
    """Copy slots ``src`` to ``dst`` (int64, one shape) in place, all reads before all writes.

    ``slot_dims`` is the dimension of ``cache`` that counts slots, or the pair (block, offset) for
    a paged cache with slot = block * block_size + offset. Any layout and strides are supported.
    """
    src, dst = src.flatten(), dst.flatten()
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)  # torch can't index every fp8
    if isinstance(slot_dims, int):
        cache.index_copy_(slot_dims, dst, cache.index_select(slot_dims, src))
        return
    paged = cache.movedim(slot_dims, (0, 1))  # [blocks, block_size, ...], a view
    size = paged.shape[1]
    paged[dst // size, dst % size] = paged[src // size, src % size]
