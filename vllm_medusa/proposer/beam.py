"""Arguments of the C++ kernels of Hydra and EAGLE: matrices, and a beam of `beam.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_medusa.kernels import CPU_DTYPES
from vllm_medusa.noise import LevelNoise
from vllm_medusa.proposer.choices import MAX_WIDTH
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam

TILE, LANES = 16, 16  # a matrix's rows are padded to a multiple; its columns must be one
_GROUP, _BLOCK = 4, 64  # columns of a group, of a block


class Matrix(Structure):
    """A linear layer."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("rows", "columns")),
    ]


class Embedding(Structure):
    """The target's embedding."""

    _fields_ = [("weight", c_void_p), ("dtype", c_int64), ("stride", c_int64)]


class BeamCall(Structure):
    """The arguments of a beam for B requests; the kernel writes to `trees`."""

    _fields_ = [
        *((name, c_void_p) for name in ("root", "max_depth")),
        *((name, c_int64) for name in ("batch", "width", "choices", "depth", "limit", "num_nodes")),
        *((name, c_void_p) for name in ("gumbel", "logit_scale", "noise_scale")),
        ("noise_levels", c_int64),
        *((name, c_void_p) for name in ("token_ids", "parents", "log_survival")),
    ]
    trees: DraftTrees
    kept: list[Tensor]  # keeps the pointers valid


def beam_call(
    beam: Beam,
    root: Tensor,  # int64 [B]
    num_nodes: int,
    max_depth: Tensor,  # int64 [B]
    limit: int | None = None,
    noise: LevelNoise | None = None,  # of the beam's levels
) -> BeamCall:
    """The call for the arguments of `build.build_tree`."""
    limit = num_nodes if limit is None else min(limit, num_nodes)
    beam, batch = beam.within(limit), len(root)
    token_ids, parents = torch.empty((2, batch, num_nodes), dtype=torch.int64)
    log_survival = torch.empty((batch, num_nodes))
    kept, shared = [root.contiguous(), max_depth.contiguous()], (None, None, None, 0)
    if noise is not None:
        parts = (noise.gumbel, noise.logit_scale, noise.noise_scale)
        kept += [part.contiguous() for part in parts]
        shared = (*(part.data_ptr() for part in kept[2:]), noise.gumbel.shape[1])  # type: ignore[assignment]
    call = BeamCall(
        kept[0].data_ptr(), kept[1].data_ptr(), batch, beam.width, beam.choices, beam.depth,
        limit, num_nodes, *shared, token_ids.data_ptr(), parents.data_ptr(),
        log_survival.data_ptr(),
    )  # fmt: skip
    call.trees, call.kept = DraftTrees.of(token_ids, parents, log_survival), kept
    return call


class KernelWeights:
    """Copies of a drafter's weights in the kernels' layout, and pointers to them."""

    def __init__(self, *, exact: bool) -> None:
        """``exact``: matrices in fp32 instead of int8 with one scale per row."""
        self._exact = exact
        self._kept: list[Any] = []  # keeps the pointers valid

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """A linear layer with ``weight`` [O, I] and ``bias`` [O]."""
        rows = -len(weight) % TILE
        weight = pad(weight.detach().float(), (0, 0, 0, rows)).contiguous()
        bias = weight.new_zeros(len(weight) - rows) if bias is None else bias.detach().float()
        shape, scale = weight.shape, None
        if not self._exact:
            scale = (weight.abs().amax(1) / 127).clamp_min(1e-30)
            weight = _in_blocks((weight / scale[:, None]).round() + 128)
        where = None if scale is None else self.pointer(scale)
        return Matrix(self.pointer(weight), where, self.pointer(pad(bias, (0, rows))), *shape)

    def matrices(self, each: Sequence[Matrix]) -> int:
        """The address of an array."""
        array = (Matrix * len(each))(*each)
        self._kept.append(array)
        return addressof(array)

    def embedding(self, weight: Tensor) -> Embedding:
        """``weight`` [V, H] is not copied."""
        return Embedding(self.pointer(weight), CPU_DTYPES[weight.dtype], weight.stride(0))

    def pointer(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept."""
        self._kept.append(tensor)
        return tensor.data_ptr()


def _in_blocks(weight: Tensor) -> Tensor:
    """Integers [O, I] from 1 to 255 as bytes in the kernel's blocks of 16 rows and 64 columns."""
    weight = pad(weight, (0, -weight.shape[1] % _BLOCK), value=128.0)
    blocks = weight.view(-1, TILE, weight.shape[1] // _BLOCK, _BLOCK // _GROUP, _GROUP)
    return blocks.permute(0, 2, 3, 1, 4).to(torch.uint8).contiguous()


def fits_kernel(embedding: Tensor, beam: Beam, draft_vocab: int) -> bool:
    """Whether the kernels support an embedding [V, H] and a beam."""
    return (
        embedding.shape[1] % LANES == 0
        and embedding.dtype in CPU_DTYPES
        and embedding.stride(1) == 1
        and beam.choices <= min(MAX_WIDTH, draft_vocab)
    )
