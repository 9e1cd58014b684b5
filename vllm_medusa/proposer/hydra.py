"""Hydra's heads on CPUs: a whole beam in one call of `hydra.cpp`.

A step drafts a few nodes, so in torch its time is spent on reading the heads' weights and on about
a hundred small operations. The kernel reads one-byte weights (fp32 if the checkpoint is in fp32)
and is one call.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads, HydraInput
from vllm_medusa.heads.model import ResBlock
from vllm_medusa.kernels import cpu_function
from vllm_medusa.noise import LevelNoise
from vllm_medusa.proposer.beam import BeamCall, Embedding, KernelWeights, beam_call, fits_kernel
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam


class _Hydra(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("first", "layers", "lm_heads")),
        ("embedding", Embedding),
        *((name, c_void_p) for name in ("token_map", "sharpness")),
        *((name, c_int64) for name in ("hidden", "num_layers", "vocab")),
        ("soft_cap", c_float),
    ]


_hydra_trees = cpu_function(
    "hydra_trees", POINTER(_Hydra), c_void_p, POINTER(BeamCall), result=c_int32
)


class HydraBeam:
    """Hydra heads with stored LM heads, copied to the layout of the kernel."""

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
        self._weights = weights = KernelWeights(exact=exact)
        first = []
        for each in heads.inputs:
            assert isinstance(each, HydraInput)
            weight = torch.cat([each.skip_weight, each.weight])
            first.append(weights.matrix(weight, torch.cat([each.skip_bias, each.bias])))
        layers = []
        for level in range(levels):
            for block in heads.blocks:
                assert isinstance(block, ResBlock)
                bias = None if block.bias is None else block.bias[level]
                layers.append(weights.matrix(block.weight[level], bias))
        lm_heads = []
        for slot, weight in enumerate(heads.lm_head_weight):
            bias = None if heads.lm_head_bias is None else heads.lm_head_bias[slot]
            lm_heads.append(weights.matrix(weight, bias))
        lm_heads *= levels // len(lm_heads)
        factors = torch.ones(levels) if sharpness is None else sharpness.float().contiguous()
        self._hydra = _Hydra(
            *(weights.matrices(each) for each in (first, layers, lm_heads)),
            weights.embedding(embedding),
            None if self.token_map is None else weights.pointer(self.token_map),
            weights.pointer(factors), size, len(heads.blocks), heads.draft_vocab_size,
            soft_cap or 0.0,
        )  # fmt: skip

    @staticmethod
    def serves(heads: HydraHeads, embedding: Tensor, beam: Beam) -> bool:
        """Whether the kernel supports these heads."""
        return (
            heads.lm_head_weight is not None
            and beam.depth <= heads.num_heads
            and fits_kernel(embedding, beam, heads.draft_vocab_size)
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
        states = hidden_states.float().contiguous()
        call = beam_call(beam, root, num_nodes, max_depth, limit, noise)
        finite = _hydra_trees(byref(self._hydra), states.data_ptr(), byref(call))
        return call.trees if finite else None
