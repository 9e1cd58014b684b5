"""Hydra heads in files: the reference's names, which are ours too.

    hydra_mlp.{h}.0.linear.weight|bias, hydra_mlp.{h}.0.res_connection.weight|bias   first layer
    hydra_mlp.{h}.{l}.linear.weight|bias                                             later layers
    hydra_lm_head.{h}.weight|bias                                 none: the target's LM head
    token_map                                                     ours, as beside Medusa heads

The reference's files are ``hydra_lm_head.pt`` (its ``*.safetensors`` too) with or without
``hydra_head.`` before each name. Its prefix attention (Hydra++) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.files import CheckpointFiles, TensorSpec
from vllm_medusa.heads.formats import TOKEN_MAP, Layout, layer_name, lm_head_name
from vllm_medusa.heads.hydra import HydraHeads, HydraInput
from vllm_medusa.heads.info import FLOATS, INTEGERS, HeadsInfo, read_token_map, stated_vocab_size
from vllm_medusa.heads.model import HeadsError, ResBlock

FORMAT = "hydra"
_PREFIX = "hydra_head."
_LAYER = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.(linear|res_connection)\.(weight|bias)")
_LM_HEAD = re.compile(r"hydra_lm_head\.(\d{1,3})\.(weight|bias)")


def is_hydra(names: Iterable[str]) -> bool:
    """Whether a checkpoint's names are those of Hydra heads."""
    return any(name.removeprefix(_PREFIX).startswith("hydra_mlp.") for name in names)


def describe(files: CheckpointFiles) -> HeadsInfo:
    """Account for every name and shape; `HeadsError` names what is not as it must be."""
    bare = {name.removeprefix(_PREFIX): name for name in files.files}
    if prefix := [name for name in bare if name.startswith("prefix_embed")]:
        raise HeadsError(
            f"{files.label} has {prefix[0]!r}: Hydra++'s prefix attention, which is not supported. "
            "Give heads of the MLP variant, or train some: vllm-medusa train --heads hydra"
        )
    layers = [match for name in bare if (match := _LAYER.fullmatch(name))]
    num_heads = 1 + max((int(match[1]) for match in layers), default=-1)
    num_layers = 1 + max((int(match[2]) for match in layers), default=-1)
    if num_heads and "hydra_mlp.0.0.res_connection.weight" not in bare:
        raise HeadsError(
            f"{files.label} has no 'hydra_mlp.0.0.res_connection.weight': these heads don't see "
            "tokens (the reference calls them not grounded). Give grounded Hydra heads"
        )
    stored = any(_LM_HEAD.fullmatch(name) for name in bare)
    bias = "hydra_lm_head.0.bias" in bare
    specs = {name: files.specs([original])[original] for name, original in bare.items()}
    hidden = _rows(specs, "hydra_mlp.0.0.linear.weight")
    rows = _rows(specs, "hydra_lm_head.0.weight") if stored else None
    mapped = _rows(specs, TOKEN_MAP) if TOKEN_MAP in specs else None
    shapes = _shapes(num_heads, num_layers, hidden, rows, bias)
    if mapped is not None:
        shapes[TOKEN_MAP] = (mapped,)
    for name in [*shapes, *bare]:
        if name not in bare:
            raise HeadsError(f"{files.label} lacks {name!r}: the file is damaged or cut")
        if name not in shapes:
            raise HeadsError(
                f"{files.label} has {bare[name]!r} left over beside {num_heads} Hydra heads of "
                f"{num_layers} layers: a format that this version does not read"
            )
        kinds, word = (INTEGERS, "integers") if name == TOKEN_MAP else (FLOATS, "floats")
        if specs[name].shape != shapes[name] or specs[name].dtype not in kinds:
            raise HeadsError(
                f"{files.label}: {bare[name]!r} is {specs[name].dtype} {list(specs[name].shape)}; "
                f"it must be {word} of shape {list(shapes[name])}"
            )
    vocab = stated_vocab_size(files) if rows is None or mapped is not None else rows
    if mapped is not None and rows not in (None, mapped):
        raise HeadsError(
            f"{files.label}: 'token_map' names {mapped} tokens, and the LM heads score {rows}. "
            "The file is damaged"
        )
    extra = files.config.get("medusa")
    base = files.config.get("base_model_name_or_path")
    floats = [spec.dtype for name, spec in specs.items() if name != TOKEN_MAP]
    dtypes = [dtype for dtype in floats if isinstance(dtype, torch.dtype)]
    return HeadsInfo(
        format=FORMAT,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab if mapped is None else mapped,
        bias=True,
        num_lm_heads=num_heads if stored else 0,
        lm_head_bias=bias,
        lm_head_rows=rows,
        token_map=mapped is not None,
        dtype=reduce(torch.promote_types, dtypes),
        tree=extra.get("tree") if isinstance(extra, dict) else None,
        base_model=base if isinstance(base, str) and base not in ("", "N/A") else None,
        config=files.config,
    )


def layout_of(files: CheckpointFiles, info: HeadsInfo) -> Layout:
    """The names as those of Medusa heads, for a look at every value; the skips have their own."""
    names: dict[str, str] = {}
    for original in files.files:
        bare = original.removeprefix(_PREFIX)
        if match := _LM_HEAD.fullmatch(bare):
            names[lm_head_name(int(match[1]), match[2])] = original
        elif (match := _LAYER.fullmatch(bare)) and match[3] == "linear":
            names[layer_name(int(match[1]), int(match[2]), match[4])] = original
        else:
            names[bare] = original
    return Layout(
        format=FORMAT,
        num_heads=info.num_heads,
        num_layers=info.num_layers,
        bias=True,
        num_lm_heads=info.num_lm_heads,
        lm_head_bias=info.lm_head_bias,
        token_map=info.token_map,
        names=names,
    )


def load(
    files: CheckpointFiles,
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_heads: int | None = None,
) -> tuple[HydraHeads, HeadsInfo]:
    """Load Hydra heads; see `checkpoint.load_heads`. The target's embedding is bound later."""
    info = describe(files)
    known = info.vocab_size if info.token_map else info.lm_head_rows
    if info.hidden_size != hidden_size or known not in (None, vocab_size):
        raise HeadsError(
            f"{files.label} was made for a target of hidden size {info.hidden_size} and "
            f"{known or vocab_size} tokens; this one has {hidden_size} and {vocab_size}. Use heads "
            "of this very model"
        )
    token_map = None
    if info.token_map:
        token_map = read_token_map(files, layout_of(files, info), vocab_size)
    count = info.num_heads if max_heads is None else min(info.num_heads, max_heads)
    heads = HydraHeads(
        count,
        info.num_layers,
        hidden_size,
        vocab_size,
        num_lm_heads=count if info.num_lm_heads else 0,
        lm_head_bias=info.lm_head_bias,
        token_map=token_map,
        device=device,
        dtype=dtype or info.dtype,
    ).requires_grad_(False)
    slots = named_tensors(heads)
    slots.pop(TOKEN_MAP, None)
    original = {name: name.removeprefix(_PREFIX) for name in files.files}
    for name, tensor in files.tensors([n for n, bare in original.items() if bare in slots]):
        slot = slots[original[name]]
        slot.copy_(tensor)
        if not bool(torch.isfinite(slot).all()):
            raise HeadsError(
                f"{files.label}: {name!r} holds NaN, infinity or values too large for "
                f"{slot.dtype}. Load the heads as float32, or retrain them"
            )
    return heads, info


def named_tensors(heads: HydraHeads) -> dict[str, Tensor]:
    """Names in files to views of the heads' tensors."""
    tensors: dict[str, Tensor] = {}
    for head, first in enumerate(heads.inputs):
        assert isinstance(first, HydraInput)
        stem = f"hydra_mlp.{head}.0"
        tensors[f"{stem}.linear.weight"] = first.weight.detach()
        tensors[f"{stem}.linear.bias"] = first.bias.detach()
        tensors[f"{stem}.res_connection.weight"] = first.skip_weight.detach()
        tensors[f"{stem}.res_connection.bias"] = first.skip_bias.detach()
        for layer, block in enumerate(heads.blocks, 1):
            assert isinstance(block, ResBlock) and block.bias is not None
            stem = f"hydra_mlp.{head}.{layer}.linear"
            tensors[f"{stem}.weight"] = block.weight.detach()[head]
            tensors[f"{stem}.bias"] = block.bias.detach()[head]
        if heads.lm_head_weight is not None:
            tensors[f"hydra_lm_head.{head}.weight"] = heads.lm_head_weight.detach()[head]
        if heads.lm_head_bias is not None:
            tensors[f"hydra_lm_head.{head}.bias"] = heads.lm_head_bias.detach()[head]
    if heads.token_map is not None:
        tensors[TOKEN_MAP] = heads.token_map
    return tensors


def config_of(heads: HydraHeads) -> dict[str, Any]:
    """The head of ``config.json``; the reference's keys where it has any."""
    return {
        "architectures": ["HydraModel"],
        "model_type": FORMAT,
        "hydra_num_heads": heads.num_heads,
        "hydra_num_layers": heads.num_layers,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.draft_vocab_size,
    }


def _shapes(
    num_heads: int, num_layers: int, hidden: int, rows: int | None, bias: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            width = (head + 2) * hidden if layer == 0 else hidden
            for kind in ("linear", "res_connection")[: 2 if layer == 0 else 1]:
                shapes[f"hydra_mlp.{head}.{layer}.{kind}.weight"] = (hidden, width)
                shapes[f"hydra_mlp.{head}.{layer}.{kind}.bias"] = (hidden,)
        if rows is not None:
            shapes[f"hydra_lm_head.{head}.weight"] = (rows, hidden)
            if bias:
                shapes[f"hydra_lm_head.{head}.bias"] = (rows,)
    return shapes


def _rows(specs: dict[str, TensorSpec], name: str) -> int:
    return specs[name].shape[0] if name in specs and specs[name].shape else 0
