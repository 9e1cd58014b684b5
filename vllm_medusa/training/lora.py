"""LoRA on a target, with peft: the backbone's part of Medusa-2.

The target's own weights never change. With the adapter disabled, the model is the original one,
the teacher of the LM loss (Medusa, https://arxiv.org/abs/2401.10774, section 2.3.2), so
no second model is needed.

The LM head is never adapted, unlike in the paper (appendix B.1): heads without their own LM head
use the target's, tied embeddings would have to be untied, and serving
scores a tree with one LM head.

Merging reads the target again from its source, in the dtype of its files. So the base weights are
exact even if the backbone was quantized or used another dtype in training, and only the adapter's
folder has to be kept.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_medusa.files import new_folder
from vllm_medusa.training.options import JointOptions
from vllm_medusa.training.target import TargetError

if TYPE_CHECKING:
    from peft import PeftModel

# files of the target: hidden ones, weights, and those rewritten or about another model
_NOT_COPIED = (
    *(".*", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx"),
    *("*.index.json", "config.json", "README.md"),
)


def attach(model: Any, joint: JointOptions, *, seed: int) -> PeftModel:
    """Add a new adapter to a causal LM, in place; everything but the adapter is frozen.

    The adapter's weights are fp32, whatever the model's dtype. It has no effect until it is
    trained. All linear layers except the LM head are adapted.

    Raises TargetError: peft does not support a layer, or the model already has an adapter.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise TargetError("Medusa-2 needs peft: pip install 'vllm-medusa[train]'") from error

    kind = type(model).__name__
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise TargetError(f"{kind} already has an adapter; merge it, or load the plain target")
    config = LoraConfig(
        r=joint.lora_rank,
        lora_alpha=joint.lora_alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft corrects it
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model.requires_grad_(False), config)
        except (ValueError, NotImplementedError) as error:
            raise TargetError(
                f"peft can't adapt {kind}: {error} Use --method medusa-1, which does not change "
                "the target"
            ) from error
    adapted.eval()  # keeps the target's own dropout off
    return adapted


@contextmanager
def original(adapted: PeftModel) -> Iterator[None]:
    """Within the block the model is the original one, without gradients."""
    with torch.no_grad(), adapted.disable_adapter():
        yield


def adapter_parameters(adapted: PeftModel) -> dict[str, nn.Parameter]:
    """Every trained parameter of the backbone, by name: only the adapter's."""
    return {name: p for name, p in adapted.named_parameters() if p.requires_grad}


def merge_adapter(source: str | Path, adapter: str | Path, folder: Path) -> Path:
    """Write the target ``source`` merged with an adapter in peft's format; returns the folder.

    The folder has the weights in the dtype of the target's files, the config, the generation
    config and all other files of the target (tokenizer, chat template, license). It is written
    atomically; an existing folder is replaced.

    Raises ValueError: a merged weight is not finite.
    """
    from huggingface_hub import snapshot_download
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source), dtype="auto")
    adapted = PeftModel.from_pretrained(model, str(adapter))
    merged: Any = adapted.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    local = Path(source)
    if not local.is_dir():  # downloaded at the start of training
        local = Path(snapshot_download(str(source), local_files_only=True))
    with new_folder(folder, overwrite=True) as part:
        merged.save_pretrained(part)
        others = shutil.ignore_patterns(*_NOT_COPIED)
        shutil.copytree(local, part, ignore=others, dirs_exist_ok=True)
    return folder
