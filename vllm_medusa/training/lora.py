"""LoRA on a target: the backbone's share of Medusa-2.

The target's own weights never change; two small matrices beside each linear layer do (rank r,
W + alpha / r * B A, B = 0 at first). Switched off, the adapter gives the original model back, which
is the teacher of the LM loss (Medusa, https://arxiv.org/abs/2401.10774, section 2.3.2), so that no
second model is held.

The LM head is never adapted, unlike in the paper (appendix B.1): heads without an LM head of their
own use the target's, where embeddings are tied an adapted one would have to be untied, and serving
scores a tree with one LM head.

Merging reads the target again from where it came, in the dtype of its files, so that a backbone
that computed in another dtype or was quantized for training gives the same result, and so that the
adapter's folder alone is enough.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_medusa.files import new_folder
from vllm_medusa.training.options import LoraSettings

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"  # peft's name of the one adapter
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_OWN = ("config.json", "README.md")  # written anew; about another model


class LoraError(ValueError):
    """A target that can't be adapted, or settings that don't fit it."""


def adaptable_modules(model: Any, chosen: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers of a causal LM's decoder, the LM head aside.

    ``chosen`` keeps those whose name is, or ends with, one of the given.

    Raises:
        LoraError: there is none, one of ``chosen`` names none or the LM head, or the model carries
            an adapter already.

    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise LoraError("Medusa-2 needs peft: pip install 'vllm-medusa[train]'") from error
    from transformers.pytorch_utils import Conv1D

    kind = type(model).__name__
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise LoraError(f"{kind} carries an adapter already; merge it, or load the plain target")
    head = model.get_output_embeddings()
    # a multimodal target's vision tower is no part of the text's decoder
    inside = {id(module) for module in (model.get_decoder() or model).modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and id(module) in inside
    ]
    if not names:
        raise LoraError(
            f"{kind} has no linear layer that LoRA could adapt, so Medusa-2 can't train it. Use "
            "--method medusa-1, which leaves the target alone"
        )
    for wanted in chosen:
        if not any(f".{name}".endswith(f".{wanted}") for name in names):
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise LoraError(
                f"LoRA module {wanted!r} is not a linear layer of {kind}'s decoder (its LM head is "
                f"never adapted); it has {kinds}"
            )
    ends = tuple(f".{wanted}" for wanted in chosen)
    return [name for name in names if not chosen or f".{name}".endswith(ends)]


def attach(model: Any, settings: LoraSettings, *, seed: int) -> PeftModel:
    """Put a fresh adapter into ``model``, in place; everything but the adapter is frozen.

    The adapter's weights are fp32 whatever the model's dtype is. It changes nothing until it is
    trained.

    Raises:
        LoraError: see `adaptable_modules`; or peft has no adapter for one of the layers.

    """
    names = adaptable_modules(model, settings.modules)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft mends it by itself
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model.requires_grad_(False), config)
        except (ValueError, NotImplementedError) as error:
            raise LoraError(
                f"peft can't adapt {type(model).__name__}: {error}. Choose other layers, or use "
                "--method medusa-1"
            ) from error
    adapted.eval()  # the target's own dropout stays off
    return adapted


@contextmanager
def original(adapted: PeftModel) -> Iterator[None]:
    """Within this the model is the original one, and nothing gets a gradient."""
    with torch.no_grad(), adapted.disable_adapter():
        yield


def adapter_parameters(adapted: PeftModel) -> dict[str, nn.Parameter]:
    """Every trained parameter of the backbone, by name: the adapter's, nothing else."""
    return {name: p for name, p in adapted.named_parameters() if p.requires_grad}


@torch.no_grad()
def merge(adapted: PeftModel) -> Any:
    """Add the adapter to the weights and take it out; returns the plain model, changed in place.

    Each sum is taken in fp32 and rounded once to the weight's dtype.

    Raises:
        LoraError: a merged weight is not finite.

    """
    from peft.tuners.lora import LoraLayer

    layers = [(n, m) for n, m in adapted.named_modules() if isinstance(m, LoraLayer)]
    layer: Any  # a `lora.Linear`, which torch's and peft's types say too little of
    for name, layer in layers:
        weight: Tensor = layer.get_base_layer().weight
        delta = layer.get_delta_weight(ADAPTER)  # laid out as the weight is
        merged = weight.float() + delta.float()
        if not bool(torch.isfinite(merged).all()):
            raise LoraError(f"{name}: the merged weight holds NaN or infinity")
        weight.copy_(merged)
    return adapted.unload()


def save_adapter(adapted: PeftModel, folder: Path) -> Path:
    """Write the adapter in peft's format, whole or not at all; returns the folder."""
    with new_folder(folder, overwrite=True) as part:
        adapted.save_pretrained(str(part), save_embedding_layers=False)
        (part / "README.md").unlink(missing_ok=True)  # peft's card holds nothing but blanks
    return folder


def merge_adapter(source: str | Path, adapter: str | Path, folder: Path) -> Path:
    """Write the target ``source`` with a `save_adapter` folder merged into it; returns the folder.

    The folder gets the weights in the dtype of the target's files, each sum rounded once, the
    config, the generation config and, from a local target, every other file (tokenizer, chat
    template, licence). It appears whole or not at all; an older one there is replaced.

    Raises:
        LoraError: the target can't be loaded, is quantised, or the sums are not finite.

    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype="auto")
    except (OSError, ValueError, ImportError) as error:
        raise LoraError(f"{source} can't be loaded to be merged: {error}") from error
    if getattr(model, "quantization_method", None) is not None:
        raise LoraError(
            f"{source} is stored quantised, and an adapter can't be merged into that without loss. "
            "Train on the unquantised model"
        )
    adaptable_modules(model)  # refuses the folder of an adapter, which transformers loads too
    merged = merge(PeftModel.from_pretrained(model, str(adapter)))
    with new_folder(folder, overwrite=True) as part:
        merged.save_pretrained(part)
        _copy_rest(source, part)
    return folder


def _copy_rest(source: str | Path, folder: Path) -> None:
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source)).save_pretrained(folder)
        return
    for file in sorted(Path(source).iterdir()):
        stored = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not (stored or file.name in _OWN or file.name.startswith(".")):
            shutil.copyfile(file, folder / file.name)
