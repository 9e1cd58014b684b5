"""The heads' folder and the target on the machine asked for, for both jobs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.heads import HydraHeads, MedusaHeads, load_heads
from vllm_medusa.training.options import MachineOptions
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import usable


def check_folder(heads: Path) -> None:
    """Refuse heads that nothing can be saved beside."""
    if not heads.is_dir():
        raise CalibrationError(
            f"{heads} is not a local folder; what is measured is saved beside the heads. Give the "
            "folder of the heads (download or convert them first)."
        )
    if not os.access(heads, os.W_OK):
        raise CalibrationError(
            f"{heads} can't be written to, where the results go; copy the heads."
        )


def load(
    model: str, heads: Path, machine: MachineOptions
) -> tuple[Target, MedusaHeads, torch.dtype]:
    """Load a target and its heads; also return what they compute in."""
    device = machine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    usable(device)
    dtype = torch.float32
    if machine.dtype != "auto":
        dtype = getattr(torch, machine.dtype)
    elif device != "cpu":
        from transformers import AutoConfig

        own = AutoConfig.from_pretrained(model).get_text_config().dtype
        dtype = own if own in (torch.bfloat16, torch.float16) else torch.float32
    target = Target.load(model, dtype=dtype, device=device, quantization=machine.quantization)
    loaded, _ = load_heads(
        heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=target.device,
    )
    if isinstance(loaded, HydraHeads):
        loaded.use_target_embedding(target.embedding_weight)
    return target, loaded, dtype
