"""Which target heads were made for: a fingerprint of its weights, cheap even for 70B parameters.

Heads fit the very weights they were trained on. Sizes don't tell a model from its fine-tune, so a
few values of every layer's every matrix are hashed: 4 runs of 64 neighbours, evenly spread (16 runs
of a tensor outside the layers, such as the embeddings), read by index and not with their file.

Covered: the values (as fp32, so that a lossless change of dtype is none), shapes and names of the
weights from the layer's number on, for every layer. Not covered, so that it stays the same: how
weights are split into files and stored (safetensors or pickles), tied tensors stored once or twice,
buffers, Medusa heads in the same files, everything in ``config.json`` and the tokenizer.

It can't see a change of values between the samples only (a few rows of the embeddings; one of many
experts: of more than 4 in a layer one is sampled, another in each layer), nor one that the file's
dtype rounds away, nor settings that act on the same weights (RoPE scaling, a chat template). It
can't know that weights were only rounded to another dtype or quantised: `match_target` calls the
latter unknown, the former different.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_medusa.heads.files import CheckpointFiles, TensorSpec, find_target
from vllm_medusa.heads.info import HeadsInfo
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.heads.samples import Run, open_runs

SCHEME = 1  # raised when the digest of the same weights changes
_RUN = 64  # neighbouring values
_RUNS_IN_LAYERS, _RUNS_OUTSIDE = 4, 16
_FEW = 4  # experts of a layer that are all sampled
_IN_LAYER = re.compile(r"(?:^|\.)((\d+)\..+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BUFFER = re.compile(r"(?:^|\.)(?:inv_freq|masked_bias|position_ids|rotary_emb\..*)$")


def target_fingerprint(source: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Fingerprint a target: a local folder, or a hub name that was downloaded before.

    Raises:
        HeadsError: No weights there, or ones that can't be read.

    """
    return fingerprint_of(find_target(source, revision))


def fingerprint_of(files: CheckpointFiles, *, seconds: float | None = None) -> dict[str, Any]:
    """Fingerprint a target whose files are found.

    Returns:
        ``sha256`` of the sampled weights, ``scheme`` of the sampling, and ``architecture``,
        ``hidden_size``, ``vocab_size``, ``num_layers``, ``quantization`` as its config says.

    Raises:
        HeadsError: Weights that can't be read.
        TimeoutError: It takes longer than ``seconds``.

    """
    deadline = None if seconds is None else time.monotonic() + seconds
    return {
        "sha256": _digest(files, deadline),
        "scheme": SCHEME,
        **config_sizes(files.config),
    }


@dataclass(frozen=True)
class TargetMatch:
    """Whether a target is the one that heads were made for; ``reason`` says how that is known."""

    verdict: Literal["same", "different", "unknown"]
    reason: str
    stored: bool = True  # whether the heads carry a fingerprint at all

    @property
    def warning(self) -> str | None:
        """What a user of both has to be told; None if nothing."""
        return self.reason if self.stored and self.verdict != "same" else None


def match_target(
    info: HeadsInfo,
    target: str | Path,
    *,
    revision: str | None = None,
    seconds: float | None = None,
    heads: str | Path = "",
) -> TargetMatch:
    """Compare the fingerprint that heads carry with a target's.

    ``heads`` is what messages call them. Nothing is raised: a target that can't be compared
    (quantised, not downloaded, too slow to read within ``seconds``) is "unknown".
    """
    name = f"The heads in {heads}" if heads else "The heads"
    stored = info.medusa.get("target")
    if not isinstance(stored, Mapping) or not isinstance(stored.get("sha256"), str):
        return TargetMatch("unknown", f"{name} do not say which target they were made for.", False)
    if stored.get("scheme") != SCHEME:
        reason = "their fingerprint of it was made by another version"
        return TargetMatch("unknown", f"{name} can't be compared with {target}: {reason}.")
    try:
        found = fingerprint_of(find_target(target, revision), seconds=seconds)
    except TimeoutError:
        reason = f"reading samples of its weights took longer than {seconds:g} s"
        return TargetMatch("unknown", f"{name} were not compared with {target}: {reason}.")
    except (HeadsError, OSError) as error:
        return TargetMatch("unknown", f"{name} were not compared with {target}: {error}.")
    if found["sha256"] == stored["sha256"]:
        return TargetMatch("same", f"{name} were made for these very weights.")
    for key, word in _SIZES:
        if stored.get(key) != found[key] and None not in (stored.get(key), found[key]):
            reason = f"that one has {word} {stored.get(key)}, this one {found[key]}"
            break
    else:
        if stored.get("quantization") != found["quantization"]:
            return TargetMatch(
                "unknown",
                f"{name} were made for weights quantised by {stored.get('quantization')}; those of "
                f"{target} are quantised by {found['quantization']}. Whether the model is the same "
                "can't be told from them.",
            )
        reason = (
            "its weights have other values: another version, a fine-tune, or the same rounded to "
            "another dtype"
        )
    return TargetMatch(
        "different",
        f"{name} were made for another target than {target} ({reason}). Output stays right, but "
        "few drafted tokens will be accepted: use the target they were trained on, or train heads "
        "for this one.",
    )


_SIZES = (
    ("num_layers", "number of layers"),
    ("hidden_size", "hidden size"),
    ("vocab_size", "vocabulary size"),
)


def _digest(files: CheckpointFiles, deadline: float | None) -> str:
    inside: list[str] = []
    outside: set[str] = set()  # without names: tied tensors are stored under one or the other
    for name, spec, run in open_runs(files, _sampled(files.files)):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        if not spec.shape or 0 in spec.shape or (len(spec.shape) == 4 and spec.shape[:2] == (1, 1)):
            continue  # scalars; causal masks
        match = _IN_LAYER.search(name)
        samples = hashlib.sha256()
        try:
            for tensor in _runs(spec, run, _RUNS_IN_LAYERS if match else _RUNS_OUTSIDE):
                kind = torch.float32 if tensor.is_floating_point() else torch.int64
                samples.update(tensor.to(kind).contiguous().numpy().tobytes())
        except (RuntimeError, TypeError, ValueError) as error:  # a dtype that torch can't convert
            raise HeadsError(f"target {files.label!r}: {name!r} can't be read: {error}") from error
        line = f"{list(spec.shape)} {samples.hexdigest()}"
        if match:
            inside.append(f"{match[1]} {line}")
        else:
            outside.add(line)
    if not inside and not outside:
        raise HeadsError(f"target {files.label!r}: no weights in its files")
    return hashlib.sha256("\n".join([*sorted(outside), *sorted(inside)]).encode()).hexdigest()


def _sampled(names: Iterable[str]) -> list[str]:
    """Every weight outside the layers and in them, but one of many experts."""
    kept: list[str] = []
    groups: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        if _BUFFER.search(name):
            continue
        layer = _IN_LAYER.search(name)
        number = _NUMBER.search(layer[1]) if layer else None
        if layer is None or number is None:
            kept.append(name)
            continue
        start = layer.start(1) + number.start()
        group = f"{name[:start]}*{name[start + len(number[0]) :]}"
        groups.setdefault(group, []).append((int(number[0]), int(layer[2]), name))
    for members in groups.values():
        members.sort()
        chosen = members if len(members) <= _FEW else [members[members[0][1] % len(members)]]
        kept += [name for _, _, name in chosen]
    return kept


def _runs(spec: TensorSpec, run: Run, count: int) -> Iterator[Tensor]:
    """``count`` runs of neighbours along the last dimension, evenly spread over all dimensions."""
    for number in range(count):
        places = [(2 * number + 1) * size // (2 * count) for size in spec.shape]
        places[-1] = min(places[-1], max(0, spec.shape[-1] - _RUN))
        yield run(places, _RUN)


def config_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's ``config.json`` says of its architecture and sizes; None where it doesn't."""
    text = config.get("text_config")
    levels = [config, text] if isinstance(text, Mapping) else [config]

    def first(*keys: str) -> Any:
        return next((level[key] for level in levels for key in keys if key in level), None)

    architectures = config.get("architectures")
    quantization = first("quantization_config")
    return {
        "architecture": architectures[0] if isinstance(architectures, list) else None,
        "hidden_size": first("hidden_size", "n_embd", "d_model"),
        "vocab_size": first("vocab_size"),
        "num_layers": first("num_hidden_layers", "n_layer", "num_layers"),
        "quantization": quantization.get("quant_method", "unnamed")
        if isinstance(quantization, Mapping)
        else None,
    }
