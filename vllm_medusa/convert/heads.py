"""Medusa heads in each format; a row of `FORMATS` describes its contents.

v1 is what the reference's loader reads; its config does not state the sizes, which come from the
target's. Stock vLLM 0.32 (``models/medusa.py``) leaves missing tensors random and ignores
unknown ones; it also reads v2, with random LM heads, so use ``vllm``. TGI
(``layers/medusa.py``) uses the target's LM head only for heads of one layer, and takes a config
with "architectures" for another kind of speculator. ``native`` is written by `heads.checkpoint`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vllm_medusa.heads.checkpoint import FLOATS, HeadsInfo, vllm_config
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.formats import TOKEN_MAP, Slot, name_of
from vllm_medusa.heads.model import HeadsError


@dataclass(frozen=True)
class Format:
    """The contents of a format."""

    file: str
    spelling: str  # a key of `heads.formats.NAMES`
    lm_heads: Literal["as stored", "one", "each", "none", "each or shared"]
    biases: bool = True  # whether the layers must have biases
    token_map: bool = False  # whether it is allowed
    lm_head_bias: bool = False  # whether it is allowed


_PICKLE, _SAFETENSORS = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
_NATIVE = "model.safetensors"
FORMATS = {
    "native": Format(_NATIVE, "vllm", "as stored", biases=False, token_map=True, lm_head_bias=True),
    "vllm": Format(_NATIVE, "vllm", "one", biases=False, token_map=True),
    "v1": Format(_PICKLE, "v1", "each"),
    "v2": Format(_SAFETENSORS, "v1", "none"),
    "tgi": Format(_SAFETENSORS, "v1", "each or shared"),
    "tensorrt-llm": Format(_PICKLE, "v1", "each"),
}
ONE = Slot("lm_head", None)  # the LM head of all heads
# Names of LM heads by architecture; the input embeddings if they are tied.
_LM_HEAD = re.compile(r"(?:.+\.)?(?:lm_head|embed_out|output)\.weight")
_EMBEDDINGS = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight"
)


@dataclass(frozen=True)
class Output:
    """Output of a conversion: one file of tensors besides ``config.json``."""

    file: str
    tensors: dict[str, Tensor]  # under the format's names
    config: dict[str, Any]
    notes: list[str]  # what was added or left out


def write_heads(to: str, info: HeadsInfo, target: CheckpointFiles | None) -> Output:
    """Write heads in a format, a key of `FORMATS`.

    Raises:
        HeadsError: Non-finite values, something that the format does not support, or a
            missing target whose LM head is needed.

    """
    form, label = FORMATS[to], info.files.label
    if info.token_map and not form.token_map:
        raise HeadsError(
            f"{label} scores only {info.draft_vocab_size} tokens (token_map); {to} does not "
            "support that. Use native or vllm"
        )
    if info.lm_head_bias and not form.lm_head_bias:
        raise HeadsError(
            f"{label} has LM heads with biases, which {to} does not support. Use native"
        )
    slots, notes = {name: slot for slot, name in info.names.items()}, list[str]()
    tensors = {slots[name]: tensor for name, tensor in info.files.finite_tensors(slots)}
    if form.biases and info.num_layers and not info.bias:
        for slot in [s for s in tensors if s.part == "layer"]:
            tensors[slot._replace(kind="bias")] = tensors[slot].new_zeros(info.hidden_size)
        notes.append("zero biases were added to layers without biases")
    rule = form.lm_heads
    if rule == "each or shared":
        rule = "each" if info.num_lm_heads or info.num_layers != 1 else "none"
    if rule == "one" and not info.num_lm_heads:
        tensors[ONE] = _target_rows(info, target)
        notes.append("a copy of the target's LM head, which the heads share, was added")
    elif rule == "each" and (not info.num_lm_heads or ONE in tensors):
        rows = tensors.pop(ONE) if ONE in tensors else _target_rows(info, target)
        tensors |= {Slot("lm_head", head): rows for head in range(info.num_heads)}
        whose = "the one" if info.num_lm_heads else "the target's"
        notes.append(f"each head has a copy of {whose} LM head, which they share")
    elif rule == "none" and info.num_lm_heads:
        raise HeadsError(f"{label} stores LM heads, which {to} does not. Use another format")
    if to == "vllm":
        notes += _for_stock_vllm(info, tensors)
    vocab = info.vocab_size
    if vocab is None and target is not None:
        vocab = config_sizes(target.config)["vocab_size"]
    sizes = {"hidden_size": info.hidden_size, "vocab_size": vocab}
    if form.spelling == "vllm":
        lm_heads = [slot for slot in tensors if slot.part == "lm_head" and slot.kind == "weight"]
        single = ONE in tensors or len(lm_heads) != info.num_heads
        config = vllm_config(info.num_heads, info.num_layers, bias=info.bias, single_lm_head=single)
        draft_vocab = len(tensors[TOKEN_MAP]) if info.token_map else vocab
        config |= {**sizes, "truncated_vocab_size": draft_vocab}
        if vocab is None:
            notes.append("the vocabulary size is unknown and was not recorded: pass --target")
    else:
        config = {"medusa_num_heads": info.num_heads, "medusa_num_layers": info.num_layers, **sizes}
        if to == "v2":
            config["version"] = "2"
        elif to == "tensorrt-llm":
            config["num_medusa_heads"] = info.num_heads
    config = {key: value for key, value in config.items() if value is not None}
    if info.base_model is not None:
        config["base_model_name_or_path"] = info.base_model
    config["medusa"] = info.medusa
    names = {name_of(slot, form.spelling, info.num_layers): t for slot, t in tensors.items()}
    return Output(form.file, names, config, notes)


def _for_stock_vllm(info: HeadsInfo, tensors: dict[Slot, Tensor]) -> list[str]:
    """Adjust ``tensors`` for stock vLLM; returns the changes."""
    lm_heads = [slot for slot in tensors if slot.part == "lm_head"]
    if info.token_map and ONE not in tensors:
        if info.num_heads > 1:
            raise HeadsError(
                f"{info.files.label} has a token_map and one LM head per head, which stock "
                "vLLM 0.32 can't load. Use native"
            )
        tensors[ONE] = tensors.pop(lm_heads[0])  # vLLM allows truncation only of a single LM head
    padding = len(tensors[lm_heads[0]]) - (info.vocab_size or 0) if not info.token_map else 0
    if padding <= 0 or info.vocab_size is None:
        return []
    for slot in lm_heads:
        tensors[slot] = tensors[slot][: info.vocab_size]
    return [f"{padding} padding rows of each LM head were removed: vLLM rejects them"]


def _target_rows(info: HeadsInfo, target: CheckpointFiles | None) -> Tensor:
    """A copy of the target's LM head, for heads that share it: [V_draft, H]."""
    if target is None:
        raise HeadsError(
            f"{info.files.label} shares the target's LM head and stores none; this format needs a "
            "copy of it. Pass --target"
        )
    rows, mapped = target_lm_head(target), info.read_token_map()
    needed = max(info.vocab_size or 0, 0 if mapped is None else int(mapped.max()) + 1)
    if len(rows) < needed:
        raise HeadsError(
            f"{info.files.label} needs an LM head of {needed} tokens; that of {target.label} has "
            f"{len(rows)}. Pass the target of these heads"
        )
    return rows if mapped is None else rows[mapped]


def target_lm_head(target: CheckpointFiles) -> Tensor:
    """A target's LM head [V, H] in its own dtype, without padding rows.

    Raises:
        HeadsError: There is none of a known name, it is quantized, or it has a bias, which a copy
            in heads would lose.

    """
    tied = target.config.get("tie_word_embeddings")
    patterns = (_LM_HEAD,) if tied is False else (_LM_HEAD, _EMBEDDINGS)
    found = [
        n for pattern in patterns for n in sorted(target.files, key=len) if pattern.fullmatch(n)
    ]
    found = [name for name in found if not re.search(r"\.\d+\.", name)]
    if not found:
        raise HeadsError(
            f"target {target.label!r}: no tensor has the name of an LM head or embeddings "
            "(lm_head.weight, model.embed_tokens.weight). Is the model quantized or incomplete?"
        )
    bias = f"{found[0].removesuffix('weight')}bias"
    if bias in target.files:
        raise HeadsError(
            f"target {target.label!r}: its LM head has a bias ({bias!r}), which a copy would "
            "lose. Use the format native, which needs no copy"
        )
    ((_, weight),) = target.tensors(found[:1])
    if weight.dtype not in FLOATS or weight.dim() != 2:
        raise HeadsError(
            f"target {target.label!r}: {found[0]!r} is {weight.dtype} {list(weight.shape)}, not a "
            "plain matrix: quantized LM heads are not copied. Pass the original model"
        )
    return weight[: config_sizes(target.config)["vocab_size"]].clone()
