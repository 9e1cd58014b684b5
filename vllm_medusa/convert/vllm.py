"""vLLM's layout: as stock vLLM 0.32 needs it, and (``native``) as this package stores it.

Both are ``model.safetensors`` with canonical names. Stock vLLM (``models/medusa.py``) leaves what
it is not given at random and passes over what it has no place for, so for its sake heads on the
target's LM head get a copy, biases of LM heads are refused, and padding rows are cut. Native heads
store what they have and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_medusa.convert.heads import MOVED, Heads, Output
from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.heads.checkpoint import layout_config
from vllm_medusa.heads.formats import lm_head_name
from vllm_medusa.heads.model import HeadsError

FILE = "model.safetensors"


def write(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads so that stock vLLM 0.32 serves them (as a chain)."""
    heads.refuse_lm_head_bias("vllm")
    if heads.token_map is not None and len(heads.lm_heads) == heads.num_heads > 1:
        raise HeadsError(
            f"{heads.label} has a token_map beside one LM head for each head, which stock vLLM "
            "0.32 can't load. Take native"
        )
    heads = _without_padding(heads.with_one_lm_head(target))
    if heads.token_map is not None and heads.num_heads == 1:  # only "the one for all" may be cut
        renamed = {n.replace("lm_heads.0.", "lm_head."): t for n, t in heads.tensors.items()}
        heads = replace(heads, tensors=renamed)
    return write_native(_in_vllms_words(heads), target)


def write_native(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads as `heads.checkpoint` writes them."""
    vocab = heads.vocab_size
    if vocab is None and target is not None:
        vocab = target.vocab_size
    own: dict[str, Any] = layout_config(
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        hidden_size=heads.hidden_size,
        vocab_size=vocab or 0,
        draft_vocab_size=(vocab or 0) if heads.token_map is None else len(heads.token_map),
        bias=heads.bias,
        single_lm_head=len(heads.lm_heads) != heads.num_heads
        or lm_head_name(None) in heads.tensors,
    )
    notes = heads.notes
    if vocab is None:
        for key in ("vocab_size", "truncated_vocab_size"):
            del own[key]
        notes += ("the vocabulary's size is not recorded, since nothing says it: give --target",)
    return Output(FILE, heads.tensors, heads.config(own), notes)


def _without_padding(heads: Heads) -> Heads:
    rows = len(heads.lm_heads[0])
    if heads.token_map is not None or heads.vocab_size is None or rows <= heads.vocab_size:
        return heads
    cut = {name: t[: heads.vocab_size] for name, t in heads.tensors.items() if "lm_head" in name}
    note = f"{rows - heads.vocab_size} padding rows of each LM head were cut: vLLM refuses them"
    return replace(heads, tensors=heads.tensors | cut, notes=(*heads.notes, note))


def _in_vllms_words(heads: Heads) -> Heads:
    """Keep foreign keys from being read as vLLM's, which takes any "num..heads" for the number.

    `Heads.read` moves them back.
    """
    mistaken = [key for key in heads.other if "num" in key and ("heads" in key or "layers" in key)]
    if not mistaken:
        return heads
    moved = {key: heads.other[key] for key in mistaken}
    return replace(
        heads,
        other={key: value for key, value in heads.other.items() if key not in moved},
        medusa=heads.medusa | {MOVED: moved},
        notes=(*heads.notes, f"{', '.join(mistaken)} moved to medusa.{MOVED} in config.json"),
    )
