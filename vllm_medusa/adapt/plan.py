"""What an adapt takes: tokens, memory, disk and time, in one table before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.files import digest_json
from vllm_medusa.job import duration
from vllm_medusa.offline.defaults import EnginePlan, Length, TargetSizes
from vllm_medusa.offline.engine import start_seconds
from vllm_medusa.options import values_of
from vllm_medusa.training.options import TrainOptions

CALIBRATED_TOKENS = 16_384  # generated tokens to calibrate on, about
ROUNDS = 3  # of the final measurement, at most
_RECORD_BYTES = 16  # of a token in a file of records: its id in digits, its text
_SHARE = 0.5  # of a machine's speed in large matrix products that real work reaches
_JOINT_PASSES = 4  # of the target, of a text in medusa-2's joint stage
_NAMES = {"medusa": "Medusa heads", "hydra": "Hydra heads", "eagle3": "an EAGLE-3 drafter"}


@dataclass(frozen=True)
class Amounts:
    """Tokens of all texts."""

    texts: int
    prompt_tokens: int
    written: int  # by the target, at most

    @classmethod
    def of(cls, lengths: Sequence[Length], samples: int, max_tokens: int, room: int) -> Amounts:
        """Of prompts continued ``samples`` times; no text has more than ``room`` positions."""
        prompts = sum(min(length.whole, room) for length in lengths)
        written = sum(
            max(0, min(length.positions(max_tokens), room) - length.whole) for length in lengths
        )
        return cls(samples * len(lengths), samples * prompts, samples * written)


@dataclass(frozen=True)
class Plan:
    """An adapt that can begin: what is asked for, and what the checks found out."""

    options: AdaptOptions
    training: TrainOptions
    target: dict[str, Any]  # its fingerprint
    different: int  # prompts that differ in more than their names
    prompts_digest: str
    amounts: Amounts
    engine: EnginePlan  # of the texts
    why: str = ""  # the dtype is what it is
    disk: int = 0  # bytes at most
    seconds: dict[str, float] = field(default_factory=dict)  # of the long stages, about

    @property
    def key(self) -> str:
        """A digest of everything that the result depends on."""
        places = dict.fromkeys(("target", "prompts", "output", "overwrite", "work"))
        trained = values_of(self.training) | dict.fromkeys(("model", "data", "heldout", "output"))
        asked = [values_of(self.options) | places, trained]
        return digest_json([asked, self.target, self.prompts_digest])[:12]

    def table(self) -> str:
        """What will be done, and what it takes."""
        options, amounts, engine = self.options, self.amounts, self.engine
        memory = "" if engine.memory is None else f", {engine.memory / 1e9:.1f} GB of memory"
        how = "compiled" if engine.compiled else "eager"
        why = f" ({self.why})" if self.why else ""
        epochs = f"{options.epochs} epoch{'s' * (options.epochs > 1)}"
        rows = {
            "distill": f"{amounts.texts} texts of up to {options.max_tokens} new tokens (prompts: "
            f"{amounts.prompt_tokens} tokens), {engine.batch} at a time by vLLM ({how}{memory})",
            "train": f"{_NAMES[options.drafter]} on them, {epochs}",
            "compare": "vLLM with it beside plain vLLM",
        }
        lines = [f"dtype {options.dtype}{why}; up to {self.disk / 1e9:.2g} GB of disk in "]
        lines[0] += str(options.work_folder)
        for name, text in rows.items():
            seconds = self.seconds.get(name)
            about = "" if seconds is None else f": about {duration(seconds)}"
            lines.append(f"  {name:8} {text}{about}")
        return "\n".join(lines)


def disk_bytes(
    amounts: Amounts, training: TrainOptions, target: dict[str, Any], sizes: TargetSizes
) -> tuple[int, int]:
    """Bytes of all files but hidden states, and of those."""
    hidden, vocab = target.get("hidden_size") or 0, target.get("vocab_size") or 0
    drafter = training.heads.kind == "eagle3"
    heads = _head_values(training, hidden, vocab) * 4 * 6  # state, copies, result
    merged = 2 * sizes.weights * (training.method == "medusa-2")
    texts = 2 * (amounts.prompt_tokens + amounts.written) * _RECORD_BYTES
    rows = amounts.written + (amounts.prompt_tokens if drafter else 0)
    kept = training.cache.cache_dtype
    kept = training.machine.dtype if kept == "auto" else kept
    width = 4 if kept in ("auto", "float32") else 2
    states = rows * hidden * (4 if drafter else 1) * width
    return texts + heads + merged, min(states, int(training.cache.cache_gb * 1e9))


def expected_seconds(
    amounts: Amounts,
    options: AdaptOptions,
    training: TrainOptions,
    target: dict[str, Any],
    sizes: TargetSizes,
    engine: EnginePlan,
) -> dict[str, float]:
    """Of the longer stages, within a factor of about two."""
    flops, bandwidth = _speeds()
    token = 2 * sizes.values / flops  # seconds of the target, of many tokens at a time
    step = max(sizes.weights / bandwidth, engine.batch * token)
    draft_vocab = min(target.get("vocab_size") or 0, 16_384)
    row = 6 * _head_values(training, target.get("hidden_size") or 0, draft_vocab) / flops
    read = (amounts.prompt_tokens + amounts.written) * token
    epochs = options.epochs
    if training.method == "medusa-2":  # both targets forwards, one of them backwards
        read *= 1 + _JOINT_PASSES * training.joint.joint_epochs
        epochs += training.joint.joint_epochs
    return {
        "distill": start_seconds(engine.arguments)
        + amounts.prompt_tokens * token
        + amounts.written / engine.batch * step,
        "train": read + epochs * amounts.written * row,
        "compare": options.measure_seconds + 4 * start_seconds({"enforce_eager": True}),
    }


def _head_values(training: TrainOptions, hidden: int, vocab: int) -> int:
    """Weights that a position passes through in training, about."""
    if training.heads.kind == "eagle3":
        return 16 * hidden * hidden + vocab * hidden
    return training.heads.num_heads * (training.heads.num_layers * hidden + vocab) * hidden


def _speeds() -> tuple[float, float]:
    """Operations and bytes per second of this machine, as real work reaches them."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    a = torch.ones(1024, 1024, device=device)

    def seconds(work: Any) -> float:
        found = []
        for _ in range(3):
            start = time.perf_counter()
            work().sum().item()  # waits for a GPU
            found.append(time.perf_counter() - start)
        return min(found)

    weights = torch.ones(1 << 24, device=device)
    return (
        _SHARE * 2 * 1024**3 / seconds(lambda: a @ a),
        _SHARE * weights.nbytes / seconds(lambda: weights),
    )
