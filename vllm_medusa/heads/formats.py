"""What the tensor names of a heads checkpoint say, in every spelling seen in the wild.

| format | names |
|---|---|
| ``v1`` | ``{h}.{l}.linear.weight|bias``, LM head of head h ``{h}.{L}.weight|bias`` |
| ``v2`` | as v1 without the LM heads: the target's is used |
| ``vllm`` | ``blocks.{h}.layers.{l}.weight|bias``, ``lm_heads.{h}.weight``, ``lm_head.weight`` |
| ``full`` | any of these behind ``medusa_head.``, beside the tensors of the target itself |

``lm_head`` is one LM head for all heads; any may carry ``token_map``. The vLLM spelling is the
canonical one: it is what the rest of the package sees and what we write. Heads, layers and biases
are counted here, from the names, because the numbers in published configs are wrong (five heads
and ``medusa_num_heads: 2``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_medusa.heads.model import HeadsError

_PREFIX = re.compile(r"(?:model\.)?medusa_heads?\.")
_V1_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_V1_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.(weight|bias)")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")
_SINGLE = ("lm_head.weight", "lm_head.bias")
TOKEN_MAP = "token_map"
_MOST = 1024  # heads, and layers of a head: a tree has fewer of the one, and nobody of the other


def is_head_tensor(name: str) -> bool:
    """Whether a tensor in a target's checkpoint belongs to Medusa heads stored with it."""
    return _PREFIX.match(name) is not None


def layer_name(head: int, layer: int, kind: str = "weight") -> str:
    """Canonical name of a residual layer's tensor."""
    return f"blocks.{head}.layers.{layer}.{kind}"


def lm_head_name(head: int | None, kind: str = "weight") -> str:
    """Canonical name of an LM head's tensor; None is the one LM head of all heads."""
    return f"lm_head.{kind}" if head is None else f"lm_heads.{head}.{kind}"


@dataclass(frozen=True)
class Layout:
    """What a checkpoint holds, by its names alone."""

    format: str  # "v1", "v2", "vllm" or "full"
    num_heads: int
    num_layers: int
    bias: bool
    num_lm_heads: int  # num_heads, 1, or 0: the target's
    lm_head_bias: bool
    token_map: bool
    names: dict[str, str]  # canonical name -> name in the file

    def lm_head_keys(self, kind: str = "weight") -> list[str]:
        """Canonical names of the stored LM heads' tensors, in order."""
        single = lm_head_name(None, kind)
        if single in self.names:
            return [single]
        return [lm_head_name(head, kind) for head in range(self.num_lm_heads)]


def head_names(names: Iterable[str]) -> list[str]:
    """The names that belong to the heads: those behind a prefix if there are any, else all."""
    names = list(names)
    return [name for name in names if _PREFIX.match(name)] or names


def read_layout(names: Iterable[str], config: Mapping[str, Any], label: str) -> Layout:
    """Count heads, layers and biases, and account for every name.

    ``label`` is what errors call the checkpoint. Raises `HeadsError` naming the tensors that are
    missing or left over.
    """
    names = list(names)
    ours = dict.fromkeys(head_names(names))
    prefix_match = _PREFIX.match(next(iter(ours))) if ours else None
    prefix = prefix_match.group() if prefix_match else ""
    bare = {name.removeprefix(prefix): name for name in ours}
    backbone = [name for name in names if name not in ours]
    for name, original in bare.items():
        if _is_head_key(name) and any(map(_too_large, re.findall(r"\d+", name))):
            raise HeadsError(
                f"{label} names a tensor {original[:80]!r}: heads and layers are numbered below "
                f"{_MOST}. The file is damaged or of a format this version does not read"
            )

    v1_layers = [match for name in bare if (match := _V1_LAYER.fullmatch(name))]
    layers = v1_layers + [match for name in bare if (match := _LAYER.fullmatch(name))]
    num_layers = max((int(match[2]) + 1 for match in layers), default=0)
    found: dict[str, str] = {}
    left_over = [name for name in backbone if _is_head_key(name)]
    for name, original in bare.items():
        canonical = _canonical(name, num_layers)
        if canonical is None or canonical in found:
            left_over.append(original)
        else:
            found[canonical] = original
    if not layers and not any(_LM_HEAD.fullmatch(name) for name in found):
        raise HeadsError(
            f"{label} holds no Medusa head: none of its {len(names)} tensors is named like one "
            f"({_listing(sorted(names))}). Is this the target model? Give the heads' own folder or "
            "file"
        )

    lm_heads = [match for name in found if (match := _LM_HEAD.fullmatch(name))]
    heads = {int(match[1]) for match in [*layers, *lm_heads]}
    num_heads = max(heads) + 1
    single = any(name in found for name in _SINGLE)
    if not single and {int(match[1]) for match in lm_heads} == {0} and num_heads > 1:
        # vLLM writes the one LM head of all heads as head 0's, and flags it
        single = bool(config.get("original_lm_head"))
        if single:
            for kind in ("weight", "bias"):
                if (stored := found.pop(lm_head_name(0, kind), None)) is not None:
                    found[lm_head_name(None, kind)] = stored
    v1 = bool(v1_layers) or (not layers and any(_V1_LM_HEAD.fullmatch(name) for name in bare))
    lm_keys = [name for name in found if name in _SINGLE or _LM_HEAD.fullmatch(name)]
    layout = Layout(
        format="full" if backbone else "vllm" if not v1 else "v1" if lm_keys else "v2",
        num_heads=num_heads,
        num_layers=num_layers,
        bias=any(match[3] == "bias" for match in layers),
        num_lm_heads=1 if single else num_heads if lm_keys else 0,
        lm_head_bias=any(name.endswith("bias") for name in lm_keys),
        token_map=TOKEN_MAP in found,
        names=found,
    )
    expected = _expected(layout)
    left_over += [found[name] for name in found if name not in expected]
    missing = [
        prefix + (v1_name(name, num_layers) if v1 else name)
        for name in expected
        if name not in found
    ]
    problems = [
        f"{what} {_listing(which)}"
        for what, which in (("lacks", missing), ("has left over", left_over))
        if which
    ]
    if problems:
        raise HeadsError(
            f"{label} {' and '.join(problems)} (its names say {num_heads} heads of {num_layers} "
            "layers). The file is damaged or of a format this version does not read"
        )
    return layout


def holds_heads(names: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether these are the names of whole Medusa heads and of nothing else."""
    try:
        return read_layout(names, config, "").format != "full"
    except HeadsError:
        return False


def _canonical(name: str, num_layers: int) -> str | None:
    if match := _V1_LAYER.fullmatch(name):
        return layer_name(int(match[1]), int(match[2]), match[3])
    if match := _V1_LM_HEAD.fullmatch(name):
        return lm_head_name(int(match[1]), match[3]) if int(match[2]) == num_layers else None
    if match := _LAYER.fullmatch(name):
        return layer_name(int(match[1]), int(match[2]), match[3])
    if match := _LM_HEAD.fullmatch(name):
        return lm_head_name(int(match[1]), match[2])
    return name if name in (*_SINGLE, TOKEN_MAP) else None


def _too_large(digits: str) -> bool:
    digits = digits.lstrip("0")
    return len(digits) > len(str(_MOST)) or int(digits or 0) >= _MOST


def _is_head_key(name: str) -> bool:
    """Whether an unprefixed name could only be a head's (the target has an ``lm_head`` too)."""
    patterns = (_V1_LAYER, _V1_LM_HEAD, _LAYER, _LM_HEAD)
    return name == TOKEN_MAP or any(pattern.fullmatch(name) for pattern in patterns)


def _expected(layout: Layout) -> dict[str, None]:
    kinds = ("weight", "bias") if layout.bias else ("weight",)
    lm_kinds = ("weight", "bias") if layout.lm_head_bias else ("weight",)
    names = [
        layer_name(head, layer, kind)
        for head in range(layout.num_heads)
        for layer in range(layout.num_layers)
        for kind in kinds
    ]
    names += [name for kind in lm_kinds for name in layout.lm_head_keys(kind)]
    if layout.token_map:
        names.append(TOKEN_MAP)
    return dict.fromkeys(names)


def v1_name(canonical: str, num_layers: int) -> str:
    """What the reference calls a tensor; names that it does not know stay."""
    if match := _LAYER.fullmatch(canonical):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := _LM_HEAD.fullmatch(canonical):
        return f"{match[1]}.{num_layers}.{match[2]}"
    return canonical


def _listing(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more tensors"
