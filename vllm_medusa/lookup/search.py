r"""Earlier occurrences of requests' last tokens, and their continuations as chains.

    text          a b c d e a b c        the last three also occur at 0
    matched 3, start 3                   so d e may follow, then a b c d e ... again

The longest match is used, and the latest if several. The continuation is a chain below the root.
How likely it is depends on the number of matching tokens, and on whether the last token's other
occurrences were followed by the same tokens (the agreement).

Tokens that are already nodes of the tree are shared, with the larger survival; the rest is
appended below the last shared node.

    tree   0          chain  x y z      joined  0
          / \                                  / \
         x   w                                x   w        x is shared
         |                                   / \
         v                                  v   y
                                                 \
                                                  z

Texts are numpy arrays on the host, or tensors on a device, where search and join are one Triton
kernel each (`kernel`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree.draft_trees import FROM_BOTH, FROM_LOOKUP, DraftTrees

MAX_MATCH = 32  # max tokens to compare
AGREEMENTS = 6  # levels
WINDOW = 4096  # last tokens of a text in which occurrences are compared for the agreement
_PLACES = 2048  # max number of latest positions to compare further

Array = Any  # a numpy array on the host, a tensor on a device


def continuations(
    texts: Array,  # integer [rows, L]
    rows: Array,  # int64 [B], each request's row
    lengths: Array,  # int64 [B], text length of each request
    count: int,
) -> tuple[Array, Array, Array]:
    """How many last tokens match an earlier position, and the ``count`` tokens after it.

    int64 [B] and [B, count], and the agreement for each of these tokens [B, count]. Past the end of
    the text, the tokens repeat. Without a match, tokens and agreement are arbitrary.

    Agreement is n / (N + 2) in `AGREEMENTS` levels: N earlier occurrences of the last token were
    followed by the same tokens so far and any further one, n of them by the same one.
    """
    if isinstance(texts, Tensor):
        from vllm_medusa.lookup import kernel

        return kernel.continuations(texts, rows, lengths, count)
    matched = np.zeros(len(rows), np.int64)
    found, agreement = np.zeros((2, len(rows), count), np.int64)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        text = texts[row, :length]
        matched[place], start = longest_match(text)
        if matched[place]:
            found[place] = text[start + np.arange(count) % (length - start)]
            agreement[place] = agreements(text, found[place])
    return matched, found, agreement


def agreements(text: np.ndarray, chain: np.ndarray) -> np.ndarray:
    """Levels of agreement, int64 [D], of a continuation [D] of ``text``, see `continuations`."""
    last = len(text) - 1
    first = max(last - WINDOW, 0)
    starts = np.flatnonzero(text[first:last] == text[last]) + first + 1
    agree = starts[text[starts] == chain[0]]
    places = agree[:, None] + np.arange(len(chain))
    inside = places <= last
    same = np.logical_and.accumulate(inside & (text[places.clip(max=last)] == chain), axis=1)
    before = np.concatenate([[len(starts)], (same[:, :-1] & inside[:, 1:]).sum(0)])
    return AGREEMENTS * same.sum(0) // (before + 2)


def longest_match(tokens: np.ndarray) -> tuple[int, int]:
    """Length of the best match of the end of ``tokens`` [n >= 1], and the position after it.

    (0, 0): no match. One pass over the text for each of the last two tokens, then only over
    positions where both match.
    """
    last = len(tokens) - 1
    same = tokens[:last] == tokens[last]
    both = same[1:] & (tokens[: max(last - 1, 0)] == tokens[last - 1])
    places = np.flatnonzero(both)[-_PLACES:] + 1
    if not len(places):
        single = np.flatnonzero(same)
        return (1, int(single[-1]) + 1) if len(single) else (0, 0)
    steps = np.arange(min(MAX_MATCH, last))
    ending = tokens[last - steps]
    latest = int(places[-1])
    if latest + 1 >= MAX_MATCH and (tokens[latest - steps] == ending).all():
        return MAX_MATCH, latest + 1  # typical of loops, which have many matching positions
    before = places[:, None] - steps  # [places, MAX_MATCH]
    same = (tokens[before.clip(0)] == ending) & (before >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(1)
    best = int(lengths.max())
    return best, int(places[lengths == best][-1]) + 1


def join(trees: DraftTrees, chain: Array, log_survival: Array, levels: int) -> DraftTrees:
    """The best nodes of ``trees`` and of a chain below each root.

    Args:
        trees: N nodes each, as in the result.
        chain: int64 [B, D], an array or a tensor.
        log_survival: float32 [B, D], decreasing; -inf after the chain's end.
        levels: upper bound of the depth of ``trees``.

    """
    if isinstance(chain, Tensor):
        from vllm_medusa.lookup import kernel

        return kernel.join(trees, chain, log_survival, levels)
    if not np.isfinite(log_survival[:, 0]).any():  # no chain
        return trees
    tokens, parents = trees.token_ids.numpy(), trees.parents.numpy()
    values, source = trees.log_survival.numpy().copy(), trees.source.numpy().copy()
    (batch, nodes), size = tokens.shape, chain.shape[1]
    every, places = np.arange(batch), np.arange(size)
    at = shared = np.zeros(batch, np.int64)  # the last shared node, and the number of shared nodes
    for level in range(min(levels, size)):
        value = log_survival[:, level]
        same = (parents == at[:, None]) & (tokens == chain[:, level, None]) & np.isfinite(values)
        follows = (shared == level) & same.any(1) & np.isfinite(value)
        if not follows.any():
            break
        at = np.where(follows, same.argmax(1), at)
        values[every, at] = np.maximum(values[every, at], np.where(follows, value, -np.inf))
        source[every, at] = np.where(follows, FROM_BOTH, source[every, at])
        shared = shared + follows
    own = np.where(places < shared[:, None], -np.inf, log_survival).astype(np.float32)
    below = np.where(places == shared[:, None], at[:, None], nodes - 1 + places)
    values = np.concatenate([values, own], 1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :nodes]
    place = np.zeros(values.shape, np.int64)
    np.put_along_axis(place, order, np.arange(nodes)[None], 1)

    def ordered(own: np.ndarray, of_chain: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.concatenate([own, of_chain], 1), order, 1)

    above = np.take_along_axis(place, ordered(parents, below).clip(0), 1)
    above[:, 0] = -1
    parts = (
        ordered(tokens, chain.clip(0)),
        above,
        np.take_along_axis(values, order, 1),
        ordered(source, np.full_like(chain, FROM_LOOKUP)),
    )
    return DraftTrees(*map(torch.from_numpy, parts))
