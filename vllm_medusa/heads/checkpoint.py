"""Reading and writing head checkpoints. Strict: nothing is dropped, guessed or left at random.

We write what stock vLLM 0.32 reads: a folder with ``model.safetensors`` (names as the ``vllm`` row
of `formats`) and ``config.json``. What vLLM has no field for is under ``"medusa"`` there: the tree,
the provenance. Two limits are vLLM's: heads on the target's LM head store none, and it would leave
its own at random, so for its sake `save_heads` can store a copy; and a token map beside one LM head
for each head fails an assertion there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.files import new_file, new_path
from vllm_medusa.heads import hydra_files
from vllm_medusa.heads.files import HEADS_FILES, find_checkpoint, read_json
from vllm_medusa.heads.formats import TOKEN_MAP, Layout, layer_name, lm_head_name
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.info import FLOATS, HeadsInfo, check_vocab, read_heads, read_token_map
from vllm_medusa.heads.model import HeadsError, MedusaHeads, ResBlock

FORMAT_VERSION = 1  # of config.json's "medusa" object


def peek_heads(source: str | Path, *, revision: str | None = None) -> HeadsInfo:
    """Describe a checkpoint (folder, file or hub name) without loading its weights.

    Raises `HeadsError` for anything `load_heads` would refuse on names, shapes or dtypes.
    """
    files = find_checkpoint(source, revision)
    if hydra_files.is_hydra(files.files):
        return hydra_files.describe(files)
    return read_heads(files)[2]


def load_heads(
    source: str | Path,
    *,
    hidden_size: int,
    vocab_size: int,
    lm_head_weight: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    max_heads: int | None = None,
) -> tuple[MedusaHeads, HeadsInfo]:
    """Load heads for a target of ``hidden_size`` and ``vocab_size``.

    ``lm_head_weight`` [>= vocab_size, H], the target's, is bound (not copied) to heads that store
    none; without it they need `MedusaHeads.compute_logits`'s ``lm_head``. It also stands in for a
    stored single LM head that is its exact copy. ``dtype`` None keeps the checkpoint's;
    ``max_heads`` loads only the first so many.

    Stored LM heads must have ``vocab_size`` rows, or one for each entry of the token map. More
    rows are padding, and cut, only where ``config.json`` states this very ``vocab_size``.

    Raises `HeadsError` naming the tensor that is missing, left over, of the wrong shape or dtype,
    not finite, or too large for ``dtype``.
    """
    files = find_checkpoint(source, revision)
    if hydra_files.is_hydra(files.files):
        hydra, info = hydra_files.load(
            files,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            dtype=dtype,
            device=device,
            max_heads=max_heads,
        )
        if lm_head_weight is not None and hydra.shared_lm_head:
            hydra.use_target_lm_head(lm_head_weight)
        return hydra, info
    _, layout, info = read_heads(files)
    if info.hidden_size != hidden_size:
        raise HeadsError(
            f"{files.label} was made for a target of hidden size {info.hidden_size}; this one has "
            f"{hidden_size}. Use heads of this very model"
        )
    dtype = info.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise HeadsError(f"dtype {dtype} is no floating-point type heads can have")
    count = info.num_heads if max_heads is None else min(info.num_heads, max_heads)
    check_vocab(files, layout, info, vocab_size)
    token_map = read_token_map(files, layout, vocab_size) if layout.token_map else None
    heads = MedusaHeads(
        num_heads=count,
        num_layers=info.num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        bias=info.bias,
        shared_lm_head=info.shared_lm_head,
        lm_head_bias=info.lm_head_bias,
        token_map=token_map,
        num_lm_heads=min(info.num_lm_heads, count),
        device=device,
        dtype=dtype,
    ).requires_grad_(False)

    slots = _named_tensors(heads)
    slots.pop(TOKEN_MAP, None)
    names = {layout.names[_stored_as(slot, layout)]: slot for slot in slots}
    for name, tensor in files.tensors(names):
        slot = slots[names[name]]
        if tensor.shape[0] != slot.shape[0]:  # an LM head with more rows than we score
            tensor = tensor[:vocab_size] if token_map is None else tensor[token_map]
        converted = tensor.to(dtype)
        _require_finite(f"{files.label}: {name!r}", tensor, converted)
        slot.copy_(converted)
    if lm_head_weight is not None:
        _bind_target(heads, lm_head_weight, layout)
    return heads, info


def save_heads(
    folder: str | Path,
    heads: MedusaHeads,
    config: Mapping[str, Any] | None = None,
    *,
    lm_head_weight: Tensor | None = None,
) -> Path:
    """Write heads as ``model.safetensors`` and ``config.json``; returns the folder.

    ``config`` is JSON: ``base_model_name_or_path`` goes to the top, everything else (``tree``,
    provenance) under ``"medusa"``. ``lm_head_weight`` stores a copy of the target's LM head with
    heads that share it, which stock vLLM 0.32 needs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in HEADS_FILES:
        if (folder / name).exists():
            raise HeadsError(f"{folder} already holds {name}, which readers prefer: save elsewhere")
    tensors = _named_tensors(heads)
    if lm_head_weight is not None:
        if isinstance(heads, HydraHeads):
            raise HeadsError("a copy of the LM head is for Medusa heads: Hydra's names have none")
        if not heads.shared_lm_head:
            raise HeadsError("lm_head_weight is only for heads that store no LM head")
        rows = lm_head_weight.detach()[: heads.vocab_size]
        rows = rows if heads.token_map is None else rows[heads.token_map]
        tensors[lm_head_name(None)] = rows
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise HeadsError(f"{name!r} holds NaN or infinity: these heads are not worth saving")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    extra = dict(config or {})
    document = _config_of(heads)
    if base := extra.pop("base_model_name_or_path", None):
        document["base_model_name_or_path"] = base
    document["medusa"] = {"format_version": FORMAT_VERSION, **extra}
    text = config_text(document, folder / "config.json")  # before any file is touched
    with new_path(folder / "model.safetensors") as path:
        save_file(tensors, path, {"format": "pt"})
    with new_file(folder / "config.json") as file:
        file.write(text)
    return folder


def _config_of(heads: MedusaHeads) -> dict[str, Any]:
    if isinstance(heads, HydraHeads):
        return hydra_files.config_of(heads)
    return layout_config(
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        hidden_size=heads.hidden_size,
        vocab_size=heads.vocab_size,
        draft_vocab_size=heads.draft_vocab_size,
        bias=heads.has_bias,
        single_lm_head=heads.num_lm_heads != heads.num_heads,
    )


def layout_config(
    *,
    num_heads: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    draft_vocab_size: int,
    bias: bool,
    single_lm_head: bool,
) -> dict[str, Any]:
    """What stock vLLM 0.32 builds its Medusa model from (``models/medusa.py``)."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": draft_vocab_size,
        "medusa_fc_bias": bias,
        "original_lm_head": single_lm_head,
    }


def update_config(folder: str | Path, /, **medusa_keys: Any) -> None:
    """Set keys of the ``"medusa"`` object in ``config.json``; None takes a key out.

    Everything else in the file stays as it is. Readers see the old file or the new one, whatever
    happens meanwhile. Without a ``config.json`` one is made. ``provenance=entry`` appends a dict to
    the list of entries; a list replaces it.

    Raises:
        HeadsError: No such folder, a config that is no JSON object, or values that are not JSON.

    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadsError(f"{folder} is no folder: a checkpoint's config.json lies in its folder")
    path = folder / "config.json"
    document = read_json(path) if path.is_file() else {}
    medusa = document.get("medusa")
    if medusa is None:  # null is read as none
        medusa = {"format_version": FORMAT_VERSION}
    if not isinstance(medusa, dict):
        raise HeadsError(f'{path}: "medusa" is {medusa!r}; it must be an object. Correct it')
    for key, value in medusa_keys.items():
        if key == "provenance" and isinstance(value, Mapping):
            entries = medusa.get("provenance")
            value = [*(entries if isinstance(entries, list) else []), value]
        if value is None:
            medusa.pop(key, None)
        else:
            medusa[key] = value
    text = config_text({**document, "medusa": medusa}, path)
    with new_file(path) as file:
        file.write(text)


def config_text(document: Mapping[str, Any], label: object) -> str:
    """The JSON of a config; `HeadsError` for what JSON has no word for, NaN included."""
    try:
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise HeadsError(f"{label}: its values must be plain JSON ({error})") from error


def _named_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """Canonical names to views of the heads' tensors."""
    if isinstance(heads, HydraHeads):
        return hydra_files.named_tensors(heads)
    tensors: dict[str, Tensor] = {}
    for layer, block in enumerate(heads.blocks):
        assert isinstance(block, ResBlock)
        for head in range(heads.num_heads):
            tensors[layer_name(head, layer)] = block.weight.detach()[head]
            if block.bias is not None:
                tensors[layer_name(head, layer, "bias")] = block.bias.detach()[head]
    single = heads.num_lm_heads == 1 < heads.num_heads
    for kind, stacked in (("weight", heads.lm_head_weight), ("bias", heads.lm_head_bias)):
        if stacked is not None:
            for head, tensor in enumerate(stacked.detach()):
                tensors[lm_head_name(None if single else head, kind)] = tensor
    if heads.token_map is not None:
        tensors[TOKEN_MAP] = heads.token_map
    return tensors


def _stored_as(slot: str, layout: Layout) -> str:
    """The checkpoint's name of a slot: the single LM head is ``lm_heads.0`` of one loaded head."""
    if slot in layout.names:
        return slot
    return slot.replace("lm_heads.0.", "lm_head.")


def _require_finite(what: str, stored: Tensor, converted: Tensor) -> None:
    if bool(torch.isfinite(converted).all()):
        return
    if bool(torch.isfinite(stored).all()):
        raise HeadsError(
            f"{what} holds values up to {float(stored.abs().max()):.3g}, too large for "
            f"{converted.dtype}. Load the heads as bfloat16 or float32"
        )
    raise HeadsError(
        f"{what} holds NaN or infinity. The training that made it diverged: retrain it"
    )


def _bind_target(heads: MedusaHeads, weight: Tensor, layout: Layout) -> None:
    if heads.lm_head_weight is not None:
        if lm_head_name(None) not in layout.names or layout.lm_head_bias:
            return  # LM heads of their own: the target's is not needed
        rows = weight.detach()[: heads.vocab_size].to(heads.lm_head_weight)
        rows = rows if heads.token_map is None else rows[heads.token_map]
        if not torch.equal(rows, heads.lm_head_weight[0]):
            return
        heads.lm_head_weight = None  # an exact copy of the target's
    heads.use_target_lm_head(weight)
