"""A fingerprint of the weights that a drafter was trained for, cheap even for 70B parameters.

A drafter fits exactly the weights it was trained on, and sizes do not distinguish fine-tunes.
So samples of every matrix of every layer are hashed: 4 runs of 64 contiguous values, evenly spread
(16 runs for tensors outside the layers, such as embeddings), without reading the rest of the file.

Covered: values (as fp32, so that a lossless change of dtype changes nothing), shapes and, in
layers, names from the layer's number on. Not covered: how weights are split into files and stored,
tied tensors stored once or twice, buffers, heads in the same files, ``config.json``, the tokenizer.
Not detected: changes between the samples, or in experts other than a layer's first four. Weights
rounded to another dtype are "different", quantized ones "unknown" to `match_target`.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from vllm_medusa.heads.files import CheckpointFiles, find_target
from vllm_medusa.heads.fit import NO, Check, Verdict
from vllm_medusa.heads.model import HeadsError

SCHEME = 1  # incremented when the digest of the same weights changes
_RUN = 64  # contiguous values
_RUNS_IN_LAYERS, _RUNS_OUTSIDE = 4, 16
_IN_LAYER = re.compile(r"(?:^|\.)(\d+\..+)")
_BUFFERS = r"(?:^|\.)(?:inv_freq|masked_bias|position_ids|rotary_emb\..*)$"
_EXPERTS = r"\.\d+\.(?:.*\.)?(?:[4-9]|\d\d+)\."  # except the first four of a layer
_LEFT_OUT = re.compile(f"{_BUFFERS}|{_EXPERTS}")


def target_fingerprint(source: str | Path) -> dict[str, Any]:
    """Fingerprint a target: a local folder, or a hub name that was downloaded before."""
    return fingerprint_of(find_target(source))


def fingerprint_of(files: CheckpointFiles, *, seconds: float = math.inf) -> dict[str, Any]:
    """Fingerprint a target whose files were found.

    Returns ``sha256`` of the sampled weights, ``scheme`` of the sampling, and `config_sizes`.

    Raises HeadsError: no weights, or unreadable ones; TimeoutError: it took longer than
    ``seconds``.
    """
    digest = _digest(files, seconds)
    return {"sha256": digest, "scheme": SCHEME, **config_sizes(files.config)}


@dataclass(frozen=True)
class TargetMatch:
    """Whether a target is the one that a drafter was made for, with the ``reason``."""

    verdict: Literal["same", "different", "unknown"]
    reason: str
    stored: bool = True  # whether the drafter has a fingerprint

    @property
    def warning(self) -> str | None:
        """A warning for users of both; None if there is none."""
        return self.reason if self.stored and self.verdict != "same" else None


def match_target(
    drafter: CheckpointFiles,
    target: str | Path,
    *,
    revision: str | None = None,
    seconds: float = math.inf,
) -> TargetMatch:
    """Compare the fingerprint stored with heads or an EAGLE drafter to a target's.

    Nothing is raised: a target that can't be compared (quantized, not downloaded, too slow to read
    within ``seconds``) is "unknown".
    """
    name = f"The drafter in {drafter.label}"
    own = drafter.config.get("medusa")
    stored = own.get("target") if isinstance(own, Mapping) else None
    if not isinstance(stored, Mapping) or not isinstance(stored.get("sha256"), str):
        return TargetMatch("unknown", f"{name} has no fingerprint of its target.", False)
    try:
        if stored.get("scheme") != SCHEME:
            raise HeadsError("its fingerprint was made by another version")
        found = fingerprint_of(find_target(target, revision), seconds=seconds)
    except (HeadsError, OSError) as error:  # TimeoutError is an OSError
        return TargetMatch("unknown", f"{name} was not compared with {target}: {error}.")
    if found["sha256"] == stored["sha256"]:
        return TargetMatch("same", f"{name} was made for exactly these weights.")
    if stored.get("quantization") != found["quantization"]:
        return TargetMatch(
            "unknown",
            f"{name} was made for weights quantized by {stored.get('quantization')}; those of "
            f"{target} are quantized by {found['quantization']}. Whether the model is the same "
            "is unknown.",
        )
    reason = "its weights have other values: another version, fine-tune or dtype"
    effect = "The output is correct, but few draft tokens will be accepted. "
    for size in ("num_layers", "hidden_size", "vocab_size"):
        if stored.get(size) is not None and stored[size] != found[size]:
            reason, effect = f"{size} is {found[size]}, not {stored[size]}", ""
    return TargetMatch(
        "different",
        f"{name} was made for another target than {target} ({reason}). {effect}Use the target "
        "that it was trained on, or train one for this target.",
    )


def of_target(drafter: CheckpointFiles, target: str | Path) -> Check:
    """`match_target` as one of the checks of an inspection."""
    match = match_target(drafter, target)
    verdicts: dict[str, Verdict] = {"same": "fits", "different": NO, "unknown": "unknown"}
    return Check("fingerprint", verdicts[match.verdict], match.reason)


def config_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Architecture and sizes in a target's ``config.json``; None if absent."""
    text = config.get("text_config")
    levels = [config, text] if isinstance(text, Mapping) else [config]

    def first(*keys: str) -> Any:
        return next((level[key] for level in levels for key in keys if key in level), None)

    architectures = config.get("architectures")
    method = first("quantization_config")
    return {
        "architecture": architectures[0] if isinstance(architectures, list) else None,
        "hidden_size": first("hidden_size", "n_embd", "d_model"),
        "vocab_size": first("vocab_size"),
        "num_layers": first("num_hidden_layers", "n_layer", "num_layers"),
        "quantization": method.get("quant_method", "unnamed")
        if isinstance(method, Mapping)
        else None,
    }


def _digest(files: CheckpointFiles, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    inside: list[str] = []
    outside: set[str] = set()  # without names: tied tensors may be stored under either
    names = [name for name in files.files if not _LEFT_OUT.search(name)]
    specs = files.specs(names)
    for name, part in files.slices(names):
        if time.monotonic() > deadline:
            raise TimeoutError(f"reading samples of its weights took longer than {seconds:g} s")
        shape = specs[name].shape
        if not shape or 0 in shape or (len(shape) == 4 and shape[:2] == (1, 1)):
            continue  # scalars and causal masks
        match = _IN_LAYER.search(name)
        samples = hashlib.sha256()
        try:
            for places in _runs(shape, _RUNS_IN_LAYERS if match else _RUNS_OUTSIDE):
                tensor = part[places]
                kind = torch.float32 if tensor.is_floating_point() else torch.int64
                samples.update(tensor.to(kind).contiguous().numpy().tobytes())
        except (RuntimeError, TypeError, ValueError, SafetensorError) as error:  # its dtype
            raise HeadsError(f"target {files.label!r}: {name!r} can't be read: {error}") from error
        line = f"{list(shape)} {samples.hexdigest()}"
        if match:
            inside.append(f"{match[1]} {line}")
        else:
            outside.add(line)
    if not inside and not outside:
        raise HeadsError(f"target {files.label!r}: no weights in its files")
    return hashlib.sha256("\n".join([*sorted(outside), *sorted(inside)]).encode()).hexdigest()


def _runs(shape: tuple[int, ...], count: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of ``count`` runs along the last dimension, evenly spread over all dimensions."""
    for number in range(count):
        *places, last = ((2 * number + 1) * size // (2 * count) for size in shape)
        last = min(last, max(0, shape[-1] - _RUN))
        yield *places, slice(last, min(last + _RUN, shape[-1]))
