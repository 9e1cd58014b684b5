"""Hydra's heads on CPUs: a whole beam in one call of `hydra.cpp`.

A step drafts a few nodes, so its time is that of reading the heads' weights and of some hundred
small operations in torch. The kernel reads weights of one byte (fp32 if the checkpoint is in fp32)
and is one call: for 7 drafts of SmolLM2 on two cores 1.0 ms, `build.of_beam` with packed heads
1.8 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_medusa.heads.hydra import HydraHeads, HydraInput
from vllm_medusa.heads.model import ResBlock
from vllm_medusa.kernels import CPU_DTYPES, cpu_library
from vllm_medusa.noise import LevelNoise
from vllm_medusa.proposer.choices import MAX_WIDTH
from vllm_medusa.tree.drafts import DraftTrees
from vllm_medusa.tree.dynamic import Beam

_TILE, _LANES = 4, 16  # a matrix's rows and columns are padded to multiples


class _Matrix(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("rows", "columns")),
    ]


class _Hydra(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("first", "layers", "lm_heads")),
        *((name, c_void_p) for name in ("embedding", "token_map", "sharpness")),
        *((name, c_int64) for name in ("hidden", "num_layers", "vocab")),
        *((name, c_int64) for name in ("embedding_dtype", "embedding_stride")),
        ("soft_cap", c_float),
    ]


class _Call(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("states", "root", "max_depth")),
        *((name, c_int64) for name in ("batch", "width", "choices", "depth", "limit", "num_nodes")),
        *((name, c_void_p) for name in ("gumbel", "logit_scale", "noise_scale")),
        ("noise_levels", c_int64),
        *((name, c_void_p) for name in ("token_ids", "parents", "log_survival")),
    ]


class HydraBeam:
    """Hydra heads with stored LM heads, copied to the kernel's layout."""

    def __init__(
        self,
        heads: HydraHeads,
        embedding: Tensor,  # [>= vocab_size, H], the target's
        sharpness: Tensor | None = None,  # float32 [levels], factors on each head's logits
        soft_cap: float | None = None,  # of the target's logits
        *,
        exact: bool = False,  # weights in fp32 instead of int8
    ) -> None:
        assert heads.lm_head_weight is not None
        levels, size = heads.num_heads, heads.hidden_size
        self.token_map = heads.token_map
        self._kept: list[Any] = [embedding]  # keeps the pointers valid
        first = []
        for each in heads.inputs:
            assert isinstance(each, HydraInput)
            weight = torch.cat([each.skip_weight, each.weight])
            first.append(self._matrix(weight, torch.cat([each.skip_bias, each.bias]), not exact))
        layers = []
        for level in range(levels):
            for block in heads.blocks:
                assert isinstance(block, ResBlock)
                bias = None if block.bias is None else block.bias[level]
                layers.append(self._matrix(block.weight[level], bias, not exact))
        lm_heads = []
        for slot, weight in enumerate(heads.lm_head_weight):
            bias = None if heads.lm_head_bias is None else heads.lm_head_bias[slot]
            lm_heads.append(self._matrix(weight, bias, not exact))
        lm_heads *= levels // len(lm_heads)
        factors = torch.ones(levels) if sharpness is None else sharpness.float().contiguous()
        self._kept.append(factors)
        self._hydra = _Hydra(
            *(self._array(matrices) for matrices in (first, layers, lm_heads)),
            embedding.data_ptr(),
            None if self.token_map is None else self.token_map.data_ptr(),
            factors.data_ptr(),
            size, len(heads.blocks), heads.draft_vocab_size, CPU_DTYPES[embedding.dtype],
            embedding.stride(0), soft_cap or 0.0,
        )  # fmt: skip

    @staticmethod
    def serves(heads: HydraHeads, embedding: Tensor, beam: Beam) -> bool:
        """Whether the kernel supports these heads."""
        return (
            heads.lm_head_weight is not None
            and heads.hidden_size % _LANES == 0
            and embedding.dtype in CPU_DTYPES
            and embedding.stride(1) == 1
            and beam.depth <= heads.num_heads
            and beam.choices <= min(MAX_WIDTH, heads.draft_vocab_size)
        )

    def draft(
        self,
        hidden_states: Tensor,  # [B, H]
        root: Tensor,  # int64 [B]
        beam: Beam,
        num_nodes: int,
        max_depth: Tensor,  # int64 [B]
        limit: int | None = None,
        noise: LevelNoise | None = None,  # of the beam's levels
    ) -> DraftTrees | None:
        """As `build.build_tree`; None if logits are not finite."""
        limit = num_nodes if limit is None else min(limit, num_nodes)
        beam, batch = beam.within(limit), len(root)
        states = hidden_states.float().contiguous()
        root, max_depth = root.contiguous(), max_depth.contiguous()
        token_ids, parents = torch.empty((2, batch, num_nodes), dtype=torch.int64)
        log_survival = torch.empty((batch, num_nodes))
        shared: tuple[Any, ...] = (None, None, None, 0)
        if noise is not None:
            parts = [part.contiguous() for part in (noise.gumbel, noise.logit_scale)]
            parts.append(noise.noise_scale.contiguous())
            shared = (*(part.data_ptr() for part in parts), noise.gumbel.shape[1])
        call = _Call(
            states.data_ptr(), root.data_ptr(), max_depth.data_ptr(), batch, beam.width,
            beam.choices, beam.depth, limit, num_nodes, *shared, token_ids.data_ptr(),
            parents.data_ptr(), log_survival.data_ptr(),
        )  # fmt: skip
        if not _kernel()(byref(self._hydra), byref(call)):
            return None
        return DraftTrees.of(token_ids, parents, log_survival)

    def _matrix(self, weight: Tensor, bias: Tensor | None, small: bool) -> _Matrix:
        """A product with ``weight`` [O, I], in one byte each if ``small``."""
        weight = weight.detach().float()
        rows = -len(weight) % _TILE
        weight = pad(weight, (0, 0, 0, rows))
        bias = (
            weight.new_zeros(len(weight)) if bias is None else pad(bias.detach().float(), (0, rows))
        )
        scale = None
        if small:
            scale = (weight.abs().amax(1) / 127).clamp_min(1e-30)
            weight = (weight / scale[:, None]).round().to(torch.int8)
        self._kept += [weight, bias, scale]
        where = None if scale is None else scale.data_ptr()
        return _Matrix(weight.data_ptr(), where, bias.data_ptr(), *weight.shape)

    def _array(self, matrices: list[_Matrix]) -> int:
        array = (_Matrix * len(matrices))(*matrices)
        self._kept.append(array)
        return addressof(array)


@functools.cache
def _kernel() -> Callable[[Any, Any], int]:
    function = cpu_library().hydra_trees
    function.argtypes, function.restype = (POINTER(_Hydra), POINTER(_Call)), c_int32
    return function  # type: ignore[no-any-return]
