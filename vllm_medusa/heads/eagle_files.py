"""EAGLE-3 drafters written to folders, as vLLM's own loader and ours read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_medusa.files import new_file, new_path
from vllm_medusa.heads.checkpoint import FORMAT_VERSION, config_text
from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.heads.model import HeadsError


def save_drafter(
    folder: str | Path, drafter: EagleDrafter, config: Mapping[str, Any] | None = None
) -> Path:
    """Write ``model.safetensors`` and, last, ``config.json``.

    ``config`` has what ``"medusa"`` in it says, and ``base_model_name_or_path``.

    Raises:
        HeadsError: A value is not finite; nothing is written.

    """
    folder = Path(folder)
    tensors = {name: t.cpu().contiguous() for name, t in drafter.tensors().items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise HeadsError(f"{name!r} holds NaN or infinity: this drafter is not worth saving")
    extra = dict(config or {})
    document = drafter.shape.config(drafter.draft_vocab_size)
    document["dtype"] = str(drafter.fc.weight.dtype).removeprefix("torch.")
    if base := extra.pop("base_model_name_or_path", None):
        document["base_model_name_or_path"] = base
    document["medusa"] = {"format_version": FORMAT_VERSION, **extra}
    text = config_text(document, folder / "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    with new_path(folder / "model.safetensors") as path:
        save_file(tensors, path, {"format": "pt"})
    with new_file(folder / "config.json") as file:
        file.write(text)
    return folder
