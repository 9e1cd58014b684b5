"""What ``auto`` means on the hardware at hand."""

from __future__ import annotations

import torch

from vllm_medusa.training.hidden_cache import DTYPES


def target_dtype(choice: str, own: str | None, device: torch.device) -> torch.dtype:
    """What the target computes in: ``auto`` is its ``own`` on a GPU and float32 on a CPU."""
    if choice != "auto":
        return DTYPES[choice]
    return torch.float32 if device.type == "cpu" else DTYPES.get(own or "", torch.bfloat16)


def require_gradients(dtype: torch.dtype) -> None:
    """Refuse what a backbone's gradients don't fit into.

    A token's share of a step's gradient is about 1e-5 and less. float16 ends at 6e-8, so that much
    of it would be 0 on its way back through the layers; nothing here scales the loss.

    Raises:
        ValueError: float16.

    """
    if dtype == torch.float16:
        raise ValueError(
            "the target computes in float16, in which the gradients of a backbone underflow. Train "
            "it with --dtype bfloat16 (or float32); what is stored keeps the target's own dtype."
        )


def use_bf16(choice: str, device: torch.device) -> bool:
    """Whether the heads compute in bfloat16: ``auto`` where the hardware multiplies it natively."""
    if choice != "auto":
        return choice == "bfloat16"
    if device.type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)
    return device.type == "cuda" and torch.cuda.is_bf16_supported()
