"""The acceptance rules in the form a device has them: Triton where it runs, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.sampler import Path, Verdict, greedy_verdict, typical_path
from vllm_medusa.scorer.paged import uses_kernel
from vllm_medusa.tree import TreeBatch


class Rules(NamedTuple):
    """Both never wait for the device."""

    # trees, token ids int64 [B, N], the target's own token at each node int64 [B, N]
    walk: Callable[[TreeBatch, Tensor, Tensor], Verdict]
    # trees, token ids, processed logits [R, V], row of each node int64 [B, N], fp32 [B] twice
    typical: Callable[[TreeBatch, Tensor, Tensor, Tensor, Tensor, Tensor], Path]

    @classmethod
    def of(cls, device: torch.device) -> Rules:
        """The rules for tensors on ``device``."""
        if not uses_kernel(device.type):
            return cls(greedy_verdict, _typical_path)
        from vllm_medusa.sampler import launch

        return cls(launch.target_verdict, launch.typical_path)


def _typical_path(
    tree: TreeBatch, token_ids: Tensor, logits: Tensor, rows: Tensor, eps: Tensor, delta: Tensor
) -> Path:
    probs = logits[rows].softmax(-1, dtype=torch.float32)  # [B, N, V]
    return typical_path(tree, token_ids, probs, eps, delta)
