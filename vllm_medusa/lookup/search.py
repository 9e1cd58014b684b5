r"""Earlier occurrences of requests' last tokens, and their continuations as chains.

    text          a b c d e a b c        the last three also occur at 0
    matched 3, start 3                   so d e may follow, then a b c d e ... again

The longest match is used, and the latest if several. The continuation is a chain below the root.
How likely it is depends on the number of matching tokens, and on how many of the last token's
earlier occurrences were followed by the same tokens (the agreement).

Tokens that are already nodes of the tree are shared, with the larger survival; the rest is
appended below the last shared node.

    tree   0          chain  x y z      joined  0
          / \                                  / \
         x   w                                x   w        x is shared
         |                                   / \
         v                                  v   y
                                                 \
                                                  z

Texts are numpy arrays on the host, where search and join are one C++ call each, or tensors on a
device, where they are one Triton kernel each (`kernel`).
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.kernels import cpu_function
from vllm_medusa.tree.draft_trees import FROM_BOTH, FROM_LOOKUP, DraftTrees

MAX_MATCH = 32  # max tokens to compare
AGREEMENTS = 6  # levels
WINDOW = 4096  # last tokens of a text in which occurrences are compared for the agreement

Array = Any  # a numpy array on the host, a tensor on a device


class _Search(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("texts", "rows", "lengths")),
        *((name, c_int64) for name in ("row_stride", "batch", "count", "max_match", "window")),
        ("levels", c_int64),
        *((name, c_void_p) for name in ("matched", "found", "agreement")),
    ]


class _Nodes(Structure):
    _fields_ = [(name, c_void_p) for name in ("tokens", "parents", "values", "source")]


class _Join(Structure):
    _fields_ = [
        *((name, _Nodes) for name in ("trees", "out")),
        *((name, c_void_p) for name in ("chain", "survival")),
        *((name, c_int64) for name in ("batch", "own", "nodes", "size", "levels")),
        *((name, c_int64) for name in ("from_both", "from_lookup")),
    ]


_search = cpu_function("lookup_search", POINTER(_Search))
_join = cpu_function("lookup_join", POINTER(_Join))


def addresses(*arrays: np.ndarray, dtype: type = np.int64) -> list[int]:
    """Of contiguous arrays, as a C++ kernel reads them."""
    assert all(array.dtype == dtype and array.flags.c_contiguous for array in arrays)
    return [array.ctypes.data for array in arrays]


def row_stride(texts: np.ndarray) -> int:
    """Of int32 texts [rows, L], in tokens."""
    assert texts.dtype == np.int32 and texts.strides[1] == texts.itemsize
    return texts.strides[0] // texts.itemsize


def continuations(
    texts: Array,  # integer [rows, L]; int32 on the host
    rows: Array,  # int64 [B], each request's row
    lengths: Array,  # int64 [B], text length of each request, at most L
    count: int,
) -> tuple[Array, Array, Array]:
    """How many last tokens match an earlier position, and the ``count`` tokens after it.

    int64 [B] and [B, count], and the agreement for each of these tokens [B, count]. Past the end of
    the text, the tokens repeat. Without a match, tokens and agreement are arbitrary.

    Agreement is n / (N + 2) in `AGREEMENTS` levels: N earlier occurrences of the last token, within
    the last `WINDOW` tokens, were followed by the continuation's previous tokens and at least one
    more, which was this token n times.
    """
    if isinstance(texts, Tensor):
        from vllm_medusa.lookup import kernel

        return kernel.continuations(texts, rows, lengths, count)
    matched, (found, agreement) = np.empty_like(lengths), np.empty((2, len(rows), count), np.int64)
    sizes = row_stride(texts), len(rows), count, MAX_MATCH, WINDOW, AGREEMENTS
    given, out = addresses(rows, lengths), addresses(matched, found, agreement)
    _search(byref(_Search(texts.ctypes.data, *given, *sizes, *out)))
    return matched, found, agreement


def join(
    trees: DraftTrees, chain: Array, log_survival: Array, levels: int, num_nodes: int = 0
) -> DraftTrees:
    """The best nodes of ``trees`` and of a chain below each root.

    Args:
        trees: N nodes each.
        chain: int64 [B, D], an array or a tensor.
        log_survival: float32 [B, D], decreasing; -inf after the chain's end.
        levels: upper bound of the depth of ``trees``.
        num_nodes: min columns of the result; on the host, ``trees`` is returned as it is if there
            is no chain.

    """
    if isinstance(chain, Tensor):
        from vllm_medusa.lookup import kernel

        return kernel.join(trees.padded(num_nodes), chain, log_survival, levels)
    if not np.isfinite(log_survival[:, 0]).any():  # no chain
        return trees
    own = [part.contiguous() for part in vars(trees).values()]
    integer = torch.int64
    assert [part.dtype for part in own] == [integer, integer, torch.float32, integer]
    batch, columns = own[0].shape
    num_nodes = max(columns, num_nodes)
    joined = [part.new_empty((batch, num_nodes)) for part in own]
    nodes = (_Nodes(*(part.data_ptr() for part in each)) for each in (own, joined))
    path = addresses(chain) + addresses(log_survival, dtype=np.float32)
    sizes = batch, columns, num_nodes, chain.shape[1], levels, FROM_BOTH, FROM_LOOKUP
    _join(byref(_Join(*nodes, *path, *sizes)))
    return DraftTrees(*joined)
