"""A look at every value of a checkpoint, for what no header tells: damage and bugs of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_medusa.heads.files import CheckpointFiles, digest_tensor
from vllm_medusa.heads.formats import TOKEN_MAP, Layout, layer_name, lm_head_name

Progress = Callable[[int, int], None]  # bytes looked at, bytes in all


@dataclass(frozen=True)
class Scan:
    """What was found; each sentence names tensors as the file does."""

    damage: list[str] = field(default_factory=list)  # such heads can't be loaded
    suspicions: list[str] = field(default_factory=list)  # they load, and something is odd


def scan_values(files: CheckpointFiles, layout: Layout, progress: Progress | None = None) -> Scan:
    """Read every tensor of the heads once.

    Damage is NaN or infinity, and a token map that names a token twice. Suspicious are LM heads of
    zeros, heads whose residual layers are all zero (never trained), and equal weights where each
    should have its own: the layers of a head (the reference's ``[ResBlock] * n``), or the heads.
    """
    scan = Scan()
    canonical = {original: name for name, original in layout.names.items()}
    sizes = {name: spec.bytes for name, spec in files.specs(canonical).items()}
    total, done = sum(sizes.values()), 0
    seen: dict[str, tuple[str, bool]] = {}  # canonical name -> digest, any value but 0
    for name, tensor in files.tensors(canonical):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            scan.damage.append(f"{name!r} holds NaN or infinity: the training diverged")
        if canonical[name] == TOKEN_MAP and tensor.unique().numel() != tensor.numel():
            scan.damage.append(f"{name!r} names some token twice")
        seen[canonical[name]] = digest_tensor(tensor), bool(tensor.any())
        done += sizes[name]
        if progress is not None:
            progress(done, total)
    extra = files.config.get("medusa")
    copies = isinstance(extra, Mapping) and "lm_heads" in (extra.get("added") or {})
    _look_at_lm_heads(layout, seen, scan.suspicions, meant=copies)
    _look_at_layers(layout, seen, scan.suspicions)
    return scan


def _look_at_lm_heads(
    layout: Layout, seen: dict[str, tuple[str, bool]], suspicions: list[str], meant: bool
) -> None:
    keys = layout.lm_head_keys() if layout.num_lm_heads else []
    zero = [layout.names[key] for key in keys if not seen[key][1]]
    if zero:
        suspicions.append(f"LM heads of zeros only, which guess nothing: {', '.join(zero)}")
    elif len(keys) > 1 and len({seen[key][0] for key in keys}) == 1 and not meant:
        suspicions.append(
            f"all {len(keys)} LM heads are equal: one would do, or the target's (convert --to v2 "
            "--target TARGET)"
        )


def _look_at_layers(
    layout: Layout, seen: dict[str, tuple[str, bool]], suspicions: list[str]
) -> None:
    kinds = ("weight", "bias") if layout.bias else ("weight",)
    untrained: list[int] = []
    repeated: list[int] = []
    alike: dict[Any, list[int]] = defaultdict(list)
    for head in range(layout.num_heads):
        layers = [
            tuple(seen[layer_name(head, layer, kind)] for kind in kinds)
            for layer in range(layout.num_layers)
        ]
        own = lm_head_name(head)
        trained = any(any_value for layer in layers for _, any_value in layer)
        if layers and not trained:
            untrained.append(head)
        if len(layers) > 1 and trained and len(set(layers)) == 1:
            repeated.append(head)
        if trained or own in seen:
            alike[(*layers, seen.get(own))].append(head)
    if untrained:
        suspicions.append(f"residual layers of zeros only, never trained: heads {untrained}")
    if repeated:
        suspicions.append(
            f"all layers of a head have the same weights: heads {repeated}. They were one layer "
            "repeated ([ResBlock] * n) when they were trained"
        )
    for heads in alike.values():
        if len(heads) > 1:
            suspicions.append(f"heads {heads} are equal: they guess the same token for each place")
