"""Lookup for the requests of an engine: copied continuations and their accuracy.

The accuracy of a continuation's next token, by the number of matching tokens so far and by the
agreement (`search`), is estimated online from every continuation whose request continued, verified
or not, because the actual next tokens are known either way. Greedy requests have higher accuracy
than sampled ones and are counted separately. Old observations decay.
"""

from __future__ import annotations

import math
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch

from vllm_medusa.kernels import cpu_function
from vllm_medusa.lookup.search import (
    AGREEMENTS,
    MAX_MATCH,
    Array,
    addresses,
    continuations,
    join,
    row_stride,
)
from vllm_medusa.tree.draft_trees import DraftTrees

MIN_SURVIVAL = 0.02  # min survival of a copied token to draft it
_ENDS = (1, 2, 3, 5, 8, 12, MAX_MATCH)  # max match length of each bucket
_PRIOR = (  # by bucket, averaged with the agreement
    (0.2, 0.35, 0.45, 0.6, 0.7, 0.8, 0.9),  # greedy
    (0.1, 0.2, 0.3, 0.45, 0.55, 0.65, 0.75),  # sampled
)
_PRIOR_TOKENS = 8.0  # weight of the prior
_WINDOW = 256.0  # tokens in the average of a cell
_MAX_CHANCE = 0.995


class _Estimates(Structure):
    """`Estimates` in search.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("right", "tried", "prior", "cell_of")),
        *((name, c_void_p) for name in ("found", "cell", "length")),
        *((name, c_int64) for name in ("cells", "count", "cell_stride")),
        *((name, c_float) for name in ("prior_tokens", "window", "max_chance", "min_survival")),
    ]


_learn = cpu_function(
    "lookup_learn",
    *(POINTER(_Estimates), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
)
_extend = cpu_function(
    "lookup_extend",
    *(POINTER(_Estimates), c_void_p, c_int64, c_int64, *[c_void_p] * 7),
)


class Lookup:
    """Finds continuations and estimates their accuracy.

    The state of a request is stored in its slot. There is no host sync. Arguments and state are
    tensors on a device, or numpy arrays on the host, where C++ functions (search.cpp) do the same.
    """

    def __init__(
        self, vocab_size: int, num_slots: int, max_tokens: int, device: torch.device | None
    ) -> None:
        """``max_tokens`` limits a continuation; ``device`` None: on the host."""
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        agreement = (np.arange(AGREEMENTS) + 0.5) / AGREEMENTS
        prior = ((np.array(_PRIOR)[..., None] + agreement) / 2).astype(np.float32).flatten()
        # the first cell of a token: greedy or sampled request, number of matching tokens before it
        bucket = np.searchsorted(_ENDS, np.arange(MAX_MATCH + max_tokens).clip(0, MAX_MATCH))

        def kept(array: np.ndarray) -> Array:
            return array if device is None else torch.from_numpy(array).to(device)

        with torch.inference_mode(False):  # otherwise writable only in inference mode
            self._places = kept(np.arange(max_tokens))
            self._cell_of = kept(AGREEMENTS * np.stack([bucket, bucket + len(_ENDS)]))
            self._cells, self._prior = kept(np.arange(prior.size)), kept(prior)
            self._right, self._tried = kept(np.zeros_like(prior)), kept(np.zeros_like(prior))
            # per slot: the continuation, its tokens' cells, the text length at that time
            self._found = kept(np.full((num_slots, max_tokens), -1))
            self._cell = kept(np.zeros((num_slots, max_tokens), np.int64))
            self._length = kept(np.full(num_slots, -1))
        self._estimates: Any = None  # on the host
        if device is None:
            state = addresses(self._right, self._tried, self._prior, dtype=np.float32)
            state += addresses(self._cell_of, self._found, self._cell, self._length)
            sizes = prior.size, max_tokens, self._cell_of.shape[1]
            limits = _PRIOR_TOKENS, _WINDOW, _MAX_CHANCE, math.log(MIN_SURVIVAL)
            self._estimates = _Estimates(*state, *sizes, *limits)

    def forget(self) -> None:
        """Reset all estimates."""
        self._right[:] = 0.0
        self._tried[:] = 0.0
        self._length[:] = -1

    @property
    def chances(self) -> Array:
        """float32 [84]: accuracy of the next token, by greedy or sampled, bucket and agreement."""
        chance = (self._right + _PRIOR_TOKENS * self._prior) / (self._tried + _PRIOR_TOKENS)
        return chance.clip(0.0, _MAX_CHANCE)

    def learn(
        self,
        slots: Array,  # int64 [B]
        texts: Array,  # integer [rows, L], prompts and outputs; int32 on the host
        rows: Array,  # int64 [B], each request's row of ``texts``
        lengths: Array,  # int64 [B], text length of each request, at most L
        num_new: Array,  # int64 [B], number of new tokens at the end of each text
    ) -> None:
        """Update estimates from the requests' new tokens and their last continuations."""
        if self._estimates is not None:
            stride, (own, *others) = row_stride(texts), addresses(slots, rows, lengths, num_new)
            of = own, len(slots), texts.ctypes.data, stride
            _learn(byref(self._estimates), *of, *others)
            return
        before, found, places = self._length[slots], self._found[slots], self._places
        new = texts[rows[:, None], (before[:, None] + places).clip(0, texts.shape[1] - 1)]
        known = (before + num_new == lengths)[:, None] & (places < num_new[:, None]) & (found >= 0)
        right = ((found == new) & known).cumprod(1)
        tried = known & (places <= right.sum(1)[:, None])
        cells = self._cell[slots][..., None] == self._cells  # [B, tokens, cells]
        rights = (cells & (right > 0)[..., None]).sum((0, 1))
        tries = (cells & tried[..., None]).sum((0, 1))
        kept = math.exp(-1.0 / _WINDOW) ** tries
        self._right[:] = kept * self._right + rights
        self._tried[:] = kept * self._tried + tries
        self._length[slots] = -1

    def extend(
        self,
        slots: Array,  # as for `learn`
        texts: Array,
        rows: Array,
        lengths: Array,
        trees: DraftTrees,  # drafted for the requests
        depth: Array,  # int64 [B], max useful depth; 0: no copies
        sampled: Array,  # bool [B], whether a request samples
        levels: int,  # upper bound of the depth of ``trees``
        num_nodes: int = 0,  # see `search.join`
    ) -> DraftTrees:
        """The requests' trees with copied continuations."""
        matched, found, agreement = continuations(texts, rows, lengths, self.max_tokens)
        if self._estimates is not None:
            survival = np.empty(found.shape, np.float32)
            own, *of = addresses(slots, lengths, depth)
            of += [*addresses(sampled, dtype=np.bool_), *addresses(matched, agreement, found)]
            of += addresses(survival, dtype=np.float32)
            _extend(byref(self._estimates), own, len(slots), self._vocab_size, *of)
            return join(trees, found, survival, levels, num_nodes)
        no_token = (found < 0) | (found >= self._vocab_size)  # such as an image placeholder
        useless = (self._places >= depth[:, None]) | (matched == 0)[:, None]
        ends = (no_token | useless).cumsum(1) > 0
        found = found.masked_fill(ends, -1)
        cells = self._cell_of[sampled[:, None] * 1, matched[:, None] + self._places] + agreement
        self._found[slots], self._cell[slots], self._length[slots] = found, cells, lengths
        survival = self.chances.log()[cells].cumsum(1)
        unlikely = survival < math.log(MIN_SURVIVAL)
        survival = survival.masked_fill(ends | unlikely, -math.inf)
        return join(trees, found, survival, levels, num_nodes)
