"""EAGLE-3's drafter on CPUs: a step's accepted tokens, and a whole beam, in one call each.

In torch each level takes about a hundred small operations and reads the weights in the target's
dtype; the kernel reads one-byte weights (fp32 if the drafter is stored in fp32).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.kernels import CPU_DTYPES, cpu_function
from vllm_medusa.proposer.beam import (
    LANES,
    BeamCall,
    Embedding,
    KernelWeights,
    Matrix,
    fits_kernel,
)
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam

MAX_ROWS = 40  # of a level or of accepted tokens; more are run by torch

_MATRICES = ("fc", "qkv", "out", "gate_up", "down", "lm_head")
_VECTORS = ("embedding_norm", "state_norm", "mlp_norm", "last_norm", "rope")


@dataclass(frozen=True, eq=False)
class EagleWeights:
    """An EAGLE-3 drafter of one layer: matrices [O, I], norms [H]."""

    fc: Tensor | None  # None: the features are the states
    qkv: Tensor  # of the norms of the token's embedding and of the state: [.., 2H]
    out: Tensor
    gate_up: Tensor
    down: Tensor
    lm_head: Tensor  # [V_draft, H]
    embedding_norm: Tensor
    state_norm: Tensor
    mlp_norm: Tensor
    last_norm: Tensor
    rope: Tensor  # [positions, D], cosines, then sines
    embedding: Tensor  # [>= V, H], the target's; not copied
    token_map: Tensor | None  # int64 [V_draft] target ids
    num_heads: int
    num_kv_heads: int
    eps: float
    norm_before_residual: bool = False
    norm_output: bool = False  # the next entry's state is the normed one
    fc_norms: tuple[Tensor, ...] = ()  # of the features before ``fc``: one, or one per state


class _Eagle(Structure):
    _fields_ = [
        *((name, Matrix) for name in _MATRICES),
        *((name, c_void_p) for name in _VECTORS),
        ("embedding", Embedding),
        *((name, c_void_p) for name in ("token_map", "fc_norm")),
        ("norm_width", c_int64),
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "vocab", "positions")),
        *((name, c_int32) for name in ("norm_before_residual", "norm_output")),
        ("eps", c_float),
    ]


class EagleCache(Structure):
    """The drafter's paged cache."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "token_offsets", "channel_offsets", "blocks")),
        *((name, c_int64) for name in ("block_size", "block_stride", "max_blocks", "window")),
        *((name, c_int32) for name in ("dtype", "paired", "truncate")),
    ]
    tensor: Tensor
    layout: Any

    @classmethod
    def of(
        cls, tensor: Tensor, layout: Any, *, truncate: bool, window: int | None = None
    ) -> EagleCache:
        """``layout`` is the tensor's `scorer.layout.CacheLayout`; `at` sets the blocks."""
        offsets = layout.token_offsets.data_ptr(), layout.channel_offsets.data_ptr()
        cache = cls(
            tensor.data_ptr(), *offsets, None, layout.block_size, layout.block_stride, 0,
            window or 0, CPU_DTYPES[tensor.dtype], layout.isa == "amx", truncate,
        )  # fmt: skip
        cache.tensor, cache.layout = tensor, layout
        return cache

    def at(self, block_table: Tensor) -> EagleCache:
        """The cache of B requests: int32 [B, blocks]."""
        assert block_table.dtype == torch.int32 and block_table.stride(1) == 1
        self.blocks, self.max_blocks = block_table.data_ptr(), block_table.stride(0)
        return self


class _Paths(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("first", "rows", "computed", "nodes", "accepted")),
        *((name, c_void_p) for name in ("input_ids", "next_tokens", "states", "strides")),
        *((name, c_void_p) for name in ("normed", "hidden")),
        *((name, c_int64) for name in ("batch", "columns", "count", "width", "dtype")),
    ]


class _Roots(Structure):
    _fields_ = [(name, c_void_p) for name in ("normed", "hidden", "ends")]


_given = POINTER(_Eagle), POINTER(EagleCache)
_eagle_prefill = cpu_function("eagle_prefill", *_given, POINTER(_Paths))
_eagle_trees = cpu_function(
    "eagle_trees", *_given, POINTER(_Roots), POINTER(BeamCall), result=c_int32
)


class EagleBeam:
    """An EAGLE-3 drafter, copied to the layout of the kernel."""

    def __init__(self, drafter: EagleWeights, *, exact: bool) -> None:
        """``exact``: weights in fp32 instead of int8."""
        self._weights = weights = KernelWeights(exact=exact)
        self.hidden_size = len(drafter.last_norm)
        mapped, norms = drafter.token_map, drafter.fc_norms
        matrices = [getattr(drafter, name) for name in _MATRICES]
        self._eagle = _Eagle(
            *(Matrix() if each is None else weights.matrix(each) for each in matrices),
            *(weights.pointer(getattr(drafter, name).float().contiguous()) for name in _VECTORS),
            weights.embedding(drafter.embedding),
            None if mapped is None else weights.pointer(mapped),
            weights.pointer(torch.cat(norms).float()) if norms else None,
            len(norms[0]) if norms else 0, self.hidden_size,
            drafter.num_heads, drafter.num_kv_heads, drafter.rope.shape[1],
            len(drafter.lm_head), len(drafter.rope), drafter.norm_before_residual,
            drafter.norm_output, drafter.eps,
        )  # fmt: skip

    @staticmethod
    def serves(drafter: EagleWeights, beam: Beam) -> bool:
        """Whether the kernel supports this drafter."""
        sizes = [drafter.rope.shape[1], drafter.down.shape[1], *map(len, drafter.fc_norms)]
        sizes += [] if drafter.fc is None else [drafter.fc.shape[1]]
        return all(size % LANES == 0 for size in sizes) and fits_kernel(
            drafter.embedding, beam, len(drafter.lm_head)
        )

    def prefill(
        self,
        cache: EagleCache,
        block_table: Tensor,  # int32 [B, blocks]
        rows: np.ndarray,  # int64 [3, B], see below
        path: tuple[Tensor, Tensor] | None,  # int64 [B, D + 1], int64 [B]; None: no drafts
        input_ids: Tensor,  # int32 [>= rows]
        next_tokens: Tensor,  # int64 [B], the tokens after the accepted ones
        states: Sequence[Tensor],  # [>= rows, width] each, the target's hidden states
    ) -> tuple[Tensor, Tensor]:
        """Store entries of accepted tokens; returns the last one's normed and hidden states [B, H].

        Both are fp32. ``rows``: each request's first row of the step, the number of its rows up to
        its root, and the first one's position. ``path``: the accepted nodes from the root on, and
        their number without it; node n is n rows after the root.
        """
        batch, count = rows.shape[1], len(states)
        if states[0].shape[1] % LANES:
            states, count = [torch.cat(list(states), 1)], 1
        normed, hidden = torch.empty((2, batch, self.hidden_size))
        numbers = torch.from_numpy(rows)
        path_pointers, columns = (None, None), 0
        if path is not None:
            path_pointers = path[0].data_ptr(), path[1].data_ptr()  # type: ignore[assignment]
            columns = path[0].stride(0)
        pointers = (c_void_p * count)(*(state.data_ptr() for state in states))
        strides = (c_int64 * count)(*(state.stride(0) for state in states))
        paths = _Paths(
            *(row.data_ptr() for row in numbers), *path_pointers, input_ids.data_ptr(),
            next_tokens.data_ptr(), addressof(pointers), addressof(strides), normed.data_ptr(),
            hidden.data_ptr(), batch, columns, count, states[0].shape[1],
            CPU_DTYPES[states[0].dtype],
        )  # fmt: skip
        _eagle_prefill(byref(self._eagle), byref(cache.at(block_table)), byref(paths))
        return normed, hidden

    def draft(
        self,
        cache: EagleCache,
        block_table: Tensor,  # int32 [B, blocks]
        normed: Tensor,  # [B, H], at the last exact entry
        hidden: Tensor,  # [B, H]
        ends: Tensor,  # int64 [B], number of exact entries
        call: BeamCall,
    ) -> DraftTrees | None:
        """As `build.build_tree`, with `beam_call`'s arguments; None if logits are not finite.

        The entries of expanded nodes are stored after the exact ones.
        """
        kept = [part.contiguous() for part in (normed.float(), hidden.float(), ends)]
        roots = _Roots(*(part.data_ptr() for part in kept))
        finite = _eagle_trees(
            byref(self._eagle), byref(cache.at(block_table)), byref(roots), byref(call)
        )
        return call.trees if finite else None
