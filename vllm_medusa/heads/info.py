"""What a checkpoint holds, from names, headers and ``config.json``: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.files import CheckpointFiles, TensorSpec, find_checkpoint
from vllm_medusa.heads.formats import TOKEN_MAP, Layout, layer_name, read_layout
from vllm_medusa.heads.model import HeadsError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class HeadsInfo:
    """A checkpoint's sizes and origin. Sizes come from the tensors, not from ``config.json``."""

    format: str  # "v1", "v2", "vllm", "full" or "hydra"
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None  # the target's; None: the checkpoint does not say
    draft_vocab_size: int | None  # tokens the heads score; None: as many as the target has
    bias: bool
    num_lm_heads: int  # num_heads, 1, or 0: the target's
    lm_head_bias: bool
    lm_head_rows: int | None  # as stored, padding included; None: nothing stored
    token_map: bool
    dtype: torch.dtype  # that holds every tensor without loss
    tree: Any | None  # the raw value of config.json's medusa.tree
    base_model: str | None
    config: dict[str, Any]

    @property
    def medusa(self) -> dict[str, Any]:
        """The config's "medusa" object."""
        return self.config.get("medusa") or {}

    @property
    def taus(self) -> tuple[float, ...]:
        """Tokens per step with 1, 2, .. nodes of the heads' own tree; empty: not known."""
        found = self.medusa.get("tree_tokens_per_step")
        numbers = isinstance(found, list) and all(isinstance(tau, int | float) for tau in found)
        return tuple(map(float, found)) if numbers and found else ()

    @property
    def sharpness(self) -> tuple[float, ...] | None:
        """[num_heads] factors on logits that make the heads' confidence right; None: not known.

        `calibrate` finds them, and leaves them in the heads' config.json.
        """
        try:
            fits = self.medusa["calibration"]["fit"]
            found = tuple(1 / fit["temperature"] if fit else 1.0 for fit in fits)
        except (TypeError, KeyError, ZeroDivisionError):
            return None
        return found if len(found) == self.num_heads and all(0 < x < 100 for x in found) else None

    @property
    def is_hydra(self) -> bool:
        """Whether these are Hydra heads, which see the branch."""
        return self.format == "hydra"

    @property
    def shared_lm_head(self) -> bool:
        """Whether the heads use the target's LM head."""
        return self.num_lm_heads == 0

    @property
    def includes_base(self) -> bool:
        """Whether the target, which was trained with the heads, is in the same checkpoint."""
        return self.format == "full"


def open_heads(
    source: str | Path, revision: str | None = None
) -> tuple[CheckpointFiles, Layout, HeadsInfo]:
    """Find a checkpoint (see `find_checkpoint`), account for every name, check every header.

    Raises `HeadsError` naming the tensor that is not as it must be.
    """
    return read_heads(find_checkpoint(source, revision))


def read_heads(files: CheckpointFiles) -> tuple[CheckpointFiles, Layout, HeadsInfo]:
    """The same of a checkpoint that was found."""
    if any("hydra_mlp." in name for name in files.files):
        raise HeadsError(
            f"{files.label} holds Hydra heads, and Medusa's are asked for. Engines, calibrate, "
            "tree and inspect take both kinds"
        )
    if "fc.weight" in {name.rsplit("model.", 1)[-1] for name in files.files}:
        raise HeadsError(
            f"{files.label} holds an EAGLE drafter, and heads are asked for. Engines take it as "
            '{"method": "eagle3", "model": ..., "tree": "dynamic"} ("eagle" for EAGLE-1 and 2) and '
            "inspect describes it; calibrate and tree do not, since its trees follow its own "
            "probabilities at every step"
        )
    layout = read_layout(files.files, files.config, files.label)
    return files, layout, _describe(files, layout)


def _describe(files: CheckpointFiles, layout: Layout) -> HeadsInfo:
    """Check every shape and dtype, and sum the checkpoint up."""
    stored = files.specs(layout.names.values())
    specs = {name: stored[original] for name, original in layout.names.items()}
    lm_weights, lm_biases = layout.lm_head_keys(), layout.lm_head_keys("bias")
    first = layer_name(0, 0) if layout.num_layers else lm_weights[0]
    if len(specs[first].shape) != 2:
        raise _wrong_shape(files, layout, first, specs[first], "a matrix")
    hidden = specs[first].shape[1]
    rows = specs[lm_weights[0]].shape[0] if layout.num_lm_heads else None
    allowed: dict[str, tuple[int | None, ...]] = dict.fromkeys(lm_weights, (rows, hidden))
    if layout.lm_head_bias:
        allowed |= dict.fromkeys(lm_biases, (rows,))
    if layout.token_map:
        allowed[TOKEN_MAP] = (specs[TOKEN_MAP].shape or (None,))[:1]
    dtypes = []
    for name, spec in specs.items():
        shape = allowed.get(name, (hidden,) if name.endswith("bias") else (hidden, hidden))
        if spec.shape != shape:
            raise _wrong_shape(files, layout, name, spec, str(list(shape)))
        kinds = INTEGERS if name == TOKEN_MAP else FLOATS
        if spec.dtype not in kinds:
            raise HeadsError(
                f"{files.label}: {layout.names[name]!r} is {_word(spec.dtype)}; it must be one of "
                f"{', '.join(map(_word, kinds))}. Quantized heads are not read: give the originals"
            )
        if name != TOKEN_MAP and isinstance(spec.dtype, torch.dtype):
            dtypes.append(spec.dtype)

    extra = files.config.get("medusa")
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise HeadsError(
            f'{files.label}: "medusa" in its config.json is {extra!r}; it must be an object such '
            'as {"tree": [[0], [0, 0]]}'
        )
    base = files.config.get("base_model_name_or_path")
    mapped = specs[TOKEN_MAP].shape[0] if layout.token_map else None
    vocab = stated_vocab_size(files)
    if mapped is None and rows is not None and (vocab is None or vocab > rows):
        vocab = rows
    return HeadsInfo(
        format=layout.format,
        num_heads=layout.num_heads,
        num_layers=layout.num_layers,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab if mapped is None else mapped,
        bias=layout.bias,
        num_lm_heads=layout.num_lm_heads,
        lm_head_bias=layout.lm_head_bias,
        lm_head_rows=rows,
        token_map=layout.token_map,
        dtype=reduce(torch.promote_types, dtypes),
        tree=extra.get("tree"),
        base_model=base if isinstance(base, str) and base not in ("", "N/A") else None,
        config=files.config,
    )


def check_vocab(files: CheckpointFiles, layout: Layout, info: HeadsInfo, vocab_size: int) -> None:
    """Refuse stored LM heads that do not fit a target of ``vocab_size``, save stated padding."""
    rows = info.lm_head_rows
    if rows in (None, vocab_size) or (info.token_map and rows == info.draft_vocab_size):
        return
    stated = stated_vocab_size(files)
    assert rows is not None
    if rows > vocab_size and stated == vocab_size:
        return
    name = layout.names[layout.lm_head_keys()[0]]
    raise HeadsError(
        f"{files.label}: {name!r} scores {rows} tokens; the target has {vocab_size}. Use heads of "
        "this very model. Fewer rows need a 'token_map'; padding rows need config.json to state "
        f'"vocab_size": {vocab_size} (it states {stated})'
    )


def read_token_map(files: CheckpointFiles, layout: Layout, vocab_size: int) -> Tensor:
    """The token map [V_draft] of heads that have one.

    Raises `HeadsError` for ids outside ``vocab_size``, and for one that is named twice.
    """
    name = layout.names[TOKEN_MAP]
    ((_, stored),) = files.tensors([name])
    token_map = stored.to(torch.int64)
    bad = token_map[(token_map < 0) | (token_map >= vocab_size)]
    if bad.numel():
        raise HeadsError(
            f"{files.label}: {name!r} holds token id {int(bad[0])}; the target's ids are 0 to "
            f"{vocab_size - 1}. Use heads of this very model"
        )
    if token_map.unique().numel() != token_map.numel():
        raise HeadsError(f"{files.label}: {name!r} names some token twice")
    return token_map


def stated_vocab_size(files: CheckpointFiles) -> int | None:
    """What the checkpoint's config says of the target's vocabulary; None: nothing."""
    value = files.config.get("vocab_size")
    return value if isinstance(value, int) and value > 0 else None


def _wrong_shape(
    files: CheckpointFiles, layout: Layout, name: str, spec: TensorSpec, allowed: str
) -> HeadsError:
    return HeadsError(
        f"{files.label}: {layout.names[name]!r} has shape {list(spec.shape)}; beside the other "
        f"tensors it must be {allowed}"
    )


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
