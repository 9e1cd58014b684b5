"""Attention masks of trees: each node's ancestors as bits of 64-bit words.

    bit j of row i is set  <=>  node i attends node j  <=>  j is i or an ancestor of i

Bit j is in word ``j // 64`` at position ``j % 64`` (little-endian). For the tree with paths
``(0,) (1,) (0, 0)``, whose parents are ``-1 0 0 1``:

    node   attends    dense row   word
    0      0          1 0 0 0     0b0001 = 1
    1      0 1        1 1 0 0     0b0011 = 3
    2      0 2        1 0 1 0     0b0101 = 5
    3      0 1 3      1 1 0 1     0b1011 = 11

Words are int64, so a word with bit 63 set is negative. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 64


def num_words(num_nodes: int) -> int:
    """Words per row for ``num_nodes`` nodes."""
    return -(-num_nodes // WORD_BITS)


def pack_ancestors(dense: Tensor) -> Tensor:
    """Pack ``dense`` bool [..., N, N] into int64 [..., N, W] with ``W = ceil(N / 64)``."""
    n = dense.shape[-1]
    words = num_words(n)
    padded = torch.nn.functional.pad(dense.to(torch.int64), (0, words * WORD_BITS - n))
    bits = padded.unflatten(-1, (words, WORD_BITS))  # [..., N, W, 64]
    shifts = torch.arange(WORD_BITS, device=dense.device)
    return (bits << shifts).sum(-1)  # distinct bits: the sum is their union


def dense_ancestors(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Ancestor matrix bool [..., N, N] of ``parents`` int64 [..., N], self included.

    A node without a parent (-1), the root or padding, attends only to itself. Each round doubles
    the distance covered: a node's set is extended by the set of its furthest ancestor. A known
    ``max_depth`` saves rounds.
    """
    n = parents.shape[-1]
    nodes = torch.arange(n, device=parents.device)
    jump = torch.where(parents < 0, nodes, parents.to(torch.int64))  # [..., N]
    reach = (nodes[:, None] == nodes).expand(*parents.shape, n)  # [..., N, N] distance 0
    farthest = n - 1 if max_depth is None else min(max_depth, n - 1)
    for _ in range(farthest.bit_length()):
        reach = reach | reach.gather(-2, jump.unsqueeze(-1).expand(reach.shape))
        jump = jump.gather(-1, jump)
    return reach
