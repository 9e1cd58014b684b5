"""The names of heads' tensors in checkpoints: one table, used for reading and writing.

| format | description |
|---|---|
| ``v1`` | the reference's ``medusa_lm_head.pt``; TGI and TensorRT-LLM use the same names |
| ``v2`` | v1 without LM heads: the target's is used |
| ``vllm`` | stock vLLM's ``model.safetensors``, also as saved by this package |
| ``full`` | a Medusa-2 model: v1's or vLLM's names after ``medusa_head.``, with the target's |
| ``hydra`` | the reference's Hydra heads (MLP variant), also as saved by this package |

Medusa heads may share one ``lm_head``; all heads may have a ``token_map``. Heads and layers are
counted from the names because the numbers in published configs are wrong (five heads and
``medusa_num_heads: 2``).

To add a format, add its names to `NAMES`, a prefix to `_PREFIX`, and a new file name to `files`; to
write it, add a row to `convert.heads.FORMATS` and its name to `convert.options`. The layouts of
EAGLE drafters are in `heads.eagle_tensors`, and written by `convert.eagle.DRAFTER_FORMATS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Slot(NamedTuple):
    """A tensor's role in heads, independent of its name in a file."""

    part: str  # "layer", "skip" (of Hydra's first layer), "lm_head" or "token_map"
    head: int | None = 0  # None: the LM head of all heads
    layer: int = 0
    kind: str = "weight"  # or "bias"


TOKEN_MAP = Slot("token_map")
NAMES = {
    "v1": {
        "layer": "{head}.{layer}.linear.{kind}",
        "lm_head": "{head}.{layer}.{kind}",  # numbered after the last layer
    },
    "vllm": {
        "layer": "blocks.{head}.layers.{layer}.{kind}",
        "lm_head": "lm_heads.{head}.{kind}",
    },
    "hydra": {
        "layer": "hydra_mlp.{head}.{layer}.linear.{kind}",
        "skip": "hydra_mlp.{head}.{layer}.res_connection.{kind}",
        "lm_head": "hydra_lm_head.{head}.{kind}",
    },
}
_GROUPS = {"head": r"(?P<head>\d{1,3})", "layer": r"(?P<layer>\d{1,3})"}
_GROUPS["kind"] = "(?P<kind>weight|bias)"
_PATTERNS = {
    spelling: {
        part: re.compile(name.replace(".", r"\.").format(**_GROUPS)) for part, name in row.items()
    }
    for spelling, row in NAMES.items()
}
_PREFIX = re.compile(r"(?:(?:model\.)?medusa_heads?|hydra_head)\.")


def is_head_tensor(name: str) -> bool:
    """Whether a tensor in a target's checkpoint belongs to heads stored with it."""
    return _PREFIX.match(name) is not None


def head_names(names: Iterable[str]) -> list[str]:
    """The names that belong to the heads: those with a prefix if there are any, else all."""
    names = list(names)
    return [name for name in names if is_head_tensor(name)] or names


def name_of(slot: Slot, spelling: str, num_layers: int) -> str:
    """A tensor's name in a spelling, a key of `NAMES`."""
    if slot == TOKEN_MAP:
        return "token_map"
    if slot.head is None:
        return f"lm_head.{slot.kind}"
    layer = num_layers if slot.part == "lm_head" else slot.layer
    return NAMES[spelling][slot.part].format(head=slot.head, layer=layer, kind=slot.kind)


def read_names(names: Iterable[str]) -> tuple[str, str, dict[Slot, str], list[str]]:
    """Identify heads' tensors, by the spelling that most names have.

    Returns:
        The spelling, a key of `NAMES`; the prefix common to all names of the heads, and to no
        others; the heads' tensors and their names; names neither of the heads nor of the target.

    """
    names = list(names)
    ours = head_names(names)
    match = _PREFIX.match(ours[0]) if ours else None
    prefix = match.group() if match else ""
    bare = [name.removeprefix(prefix) for name in ours]
    found = {spelling: [_slot(name, spelling) for name in bare] for spelling in NAMES}
    spelling = max(found, key=lambda key: sum(slot is not None for slot in found[key]))
    layers = [slot.layer for slot in found[spelling] if slot and slot.part == "layer"]
    num_layers = 1 + max(layers, default=-1)
    slots: dict[Slot, str] = {}
    left_over = []
    for name, slot in zip(ours, found[spelling], strict=True):
        if slot and slot.part == "lm_head" and spelling == "v1" and slot.head is not None:
            slot = slot._replace(layer=0) if slot.layer == num_layers else None
        if slot is None or slot in slots:
            left_over.append(name)
        else:
            slots[slot] = name
    if prefix:  # other names are the target's, which has an `lm_head` too
        others = [n for n in names if not is_head_tensor(n) and n[:8] != "lm_head."]
        left_over += [n for n in others if any(_slot(n, each) is not None for each in NAMES)]
    return spelling, prefix, slots, left_over


def heads_alone(names: Iterable[str]) -> bool:
    """Whether these are names of heads only."""
    _, _, slots, left_over = read_names(names)
    return not left_over and any(slot != TOKEN_MAP and slot.head is not None for slot in slots)


def listing(names: list[str]) -> str:
    """Up to four names, and how many more there are."""
    shown = ", ".join(repr(name[:80]) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"


def _slot(name: str, spelling: str) -> Slot | None:
    if name == "token_map":
        return TOKEN_MAP
    if name in ("lm_head.weight", "lm_head.bias") and spelling != "hydra":
        return Slot("lm_head", None, kind=name.removeprefix("lm_head."))
    for part, pattern in _PATTERNS[spelling].items():
        if match := pattern.fullmatch(name):
            found = match.groupdict()
            return Slot(part, int(found["head"]), int(found.get("layer", 0)), found["kind"])
    return None
