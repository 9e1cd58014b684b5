"""How much work an adapt is: tokens, bytes on the disk, and seconds once there are rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.offline.lengths import Length
from vllm_medusa.training.heldout import LEAST
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.recipe import usual_batch

_RECORD_BYTES = 16  # of a token in a file of records: its id in digits, its text
_ENGINE_SHARE = 0.7  # of the speed of the bare matrix products that an engine reaches
_START_SECONDS = {False: 20.0, True: 75.0}  # of an engine, compiled or not
_JOINT_PASSES = 4  # of the target, of a text in medusa-2's joint stage
_MEASURED_ENGINES = 4  # plain vLLM, two sizes, automatic


@dataclass(frozen=True)
class Amounts:
    """Tokens of all texts."""

    texts: int
    prompt_tokens: int
    written: int  # by the target, at most until it has written them

    @classmethod
    def of(cls, lengths: Iterable[Length], samples: int, max_tokens: int, room: int) -> Amounts:
        """Of prompts continued ``samples`` times; no text has more than ``room`` positions."""
        prompts = texts = written = 0
        for length in lengths:
            texts += samples
            prompts += samples * min(length.whole, room)
            written += samples * max(0, min(length.positions(max_tokens), room) - length.whole)
        return cls(texts, prompts, written)


@dataclass(frozen=True)
class Disk:
    """Bytes that are needed, of the files beside the cache of hidden states, and of that cache."""

    files: int
    states: int

    @classmethod
    def of(
        cls, amounts: Amounts, options: AdaptOptions, training: TrainOptions, sizes: dict[str, int]
    ) -> Disk:
        """``sizes``: hidden_size, vocab_size, weights in bytes and state_bytes of a value."""
        hidden, drafter = sizes["hidden_size"], training.heads.kind == "eagle3"
        layers = training.heads.num_heads * training.heads.num_layers
        values = layers * hidden * hidden
        if drafter:
            values = 16 * hidden * hidden + sizes["vocab_size"] * hidden
        elif training.heads.lm_heads == "own":
            values += training.heads.num_heads * sizes["vocab_size"] * hidden
        heads = values * 4 * 6  # state, copies, result
        target = 2 * sizes["weights"] * (training.method == "medusa-2")
        texts = 2 * (amounts.prompt_tokens + amounts.written) * _RECORD_BYTES
        rows = amounts.written + (amounts.prompt_tokens if drafter else 0)
        states = rows * hidden * (4 if drafter else 1) * sizes["state_bytes"]
        kept = min(states, int(training.cache.cache_gb * 1e9))
        return cls(texts + heads + target, kept)


@dataclass(frozen=True)
class Rates:
    """What was measured of this machine on random text."""

    prefill: float  # tokens a second through the target
    step: float  # seconds for one more token of each of ``batch`` texts
    batch: int
    training: float  # rows a second

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def expected_seconds(
    amounts: Amounts,
    rates: Rates,
    options: AdaptOptions,
    training: TrainOptions,
    *,
    compiled: bool,
) -> dict[str, float]:
    """Of the longer stages, by their names: what the rates let expect."""
    tokens = amounts.prompt_tokens + amounts.written
    share = max(options.texts.heldout_share, min(0.5, LEAST / amounts.texts)) / 2
    share = min(share, options.measuring.positions / amounts.written)
    calibrated = share * (tokens / rates.prefill + amounts.written / rates.training)
    written = amounts.written / rates.batch * rates.step + amounts.prompt_tokens / rates.prefill
    epochs = training.training.epochs
    if training.method == "medusa-2":  # both targets forwards, one of them backwards
        tokens *= 1 + _JOINT_PASSES * training.joint.joint_epochs
        epochs += training.joint.joint_epochs
    stages = {
        "distill": _START_SECONDS[compiled] + written / _ENGINE_SHARE,
        "train": tokens / rates.prefill + epochs * amounts.written / rates.training,
        "calibrate": calibrated,
        "compare": options.measuring.measure_seconds + _MEASURED_ENGINES * _START_SECONDS[False],
    }
    if options.training.drafter == "eagle3":
        del stages["calibrate"]
    return stages


def batch_rows(training: TrainOptions, amounts: Amounts) -> int:
    """Positions a step of training, as `recipe.complete` will choose them."""
    steps = training.training
    return steps.batch_tokens or usual_batch(amounts.written * steps.epochs)
