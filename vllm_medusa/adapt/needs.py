"""What an adapt needs of the target, the prompts and the machine, and where it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_medusa.adapt.amounts import Amounts, Disk
from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.files import free_bytes
from vllm_medusa.job import Progress
from vllm_medusa.offline.defaults import EnginePlan, TargetSizes
from vllm_medusa.offline.lengths import Length, has_template, measure_prompts
from vllm_medusa.offline.machine import fast_bfloat16
from vllm_medusa.offline.prompts import BadLine, Prompt, settle_bad_lines
from vllm_medusa.options import Dtype
from vllm_medusa.training.options import TrainOptions

_RESERVE = 1 << 30  # bytes that stay free


def announced(
    options: AdaptOptions, why: str, amounts: Amounts, engine: EnginePlan, disk: Disk
) -> str:
    """The first line: what will be done, and what it takes; ``why`` the dtype is what it is."""
    texts, own = options.texts, options.training
    memory = "" if engine.memory is None else f" in {engine.memory / 1e9:.1f} GB of memory"
    names = {"medusa": "Medusa heads", "hydra": "Hydra heads", "eagle3": "an EAGLE-3 drafter"}
    how = "compiled" if engine.compiled else "eager"
    return (
        f"{amounts.texts} texts of up to {texts.max_tokens} new tokens (prompts: "
        f"{amounts.prompt_tokens} tokens), {engine.batch} at a time by vLLM{memory} ({how}, dtype "
        f"{options.dtype}{why and ', '}{why}); {names[own.drafter]} trained on them for "
        f"{own.epochs} epoch{'s' * (own.epochs > 1)}; up to "
        f"{(disk.files + disk.states) / 1e9:.2g} GB of disk in {options.work_folder}"
    )


def with_dtype(
    options: AdaptOptions, training: TrainOptions
) -> tuple[AdaptOptions, TrainOptions, str]:
    """On a CPU, a bfloat16 target's dtype in all stages, where it is left open; and why."""
    import torch
    from transformers import AutoConfig

    own = str(getattr(AutoConfig.from_pretrained(options.target).get_text_config(), "dtype", None))
    on_cpu = not torch.accelerator.is_available() and training.machine.device in ("auto", "cpu")
    if options.dtype != "auto" or own != "torch.bfloat16" or not on_cpu:
        return options, training, ""
    dtype: Dtype = "bfloat16"
    why = "the target's own, which this CPU multiplies natively"
    if not fast_bfloat16():
        dtype, why = "float32", "since this CPU has no instructions for the target's bfloat16"
    machine = replace(training.machine, dtype=dtype)
    return replace(options, dtype=dtype), replace(training, machine=machine), why


def measure(
    prompts: Sequence[Prompt], options: AdaptOptions, limit: int | None, progress: Progress
) -> list[Length]:
    """How long the prompts are; those that the target can't answer are bad lines."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    conversations = sum(bool(prompt.turns) for prompt in prompts)
    if conversations and not has_template(tokenizer):
        progress.warn(
            f"{options.target} has no chat template, so the {conversations} conversations among "
            "the prompts are given to it as plain text, turn after turn. If it is served with a "
            "template, put that into its folder as chat_template.jinja first."
        )
    least = options.training.num_heads + 2
    good: list[Length] = []
    bad: list[BadLine] = []
    cut = 0
    for each in measure_prompts(prompts, tokenizer):
        if isinstance(each, Length) and limit is not None and each.first + least > limit:
            reason = f"{each.first} tokens, and the target reads {limit} with the answer"
            each = BadLine(each.prompt.index, each.prompt.line, reason)
        if isinstance(each, BadLine):
            bad.append(each)
            continue
        good.append(each)
        cut += limit is not None and each.positions(options.texts.max_tokens) > limit
    files = options.files
    settle_bad_lines(files.prompts, bad, files.on_bad_line, progress)
    if len(good) < 2:
        raise ValueError(
            f"{files.prompts}: {len(good)} prompts are left; at least 2 are needed. Give shorter "
            "ones."
        )
    if cut:
        progress.note(
            f"{cut} answers may be cut short: with {options.texts.max_tokens} tokens they would "
            f"not fit into the target's {limit} positions behind their prompts"
        )
    return good


def check_disk(
    options: AdaptOptions,
    training: TrainOptions,
    amounts: Amounts,
    target: Mapping[str, Any],
    sizes: TargetSizes,
) -> Disk:
    """Refuse a disk on which the longest texts and their hidden states would not fit."""
    cache, work = training.cache.cache, options.work_folder
    kept = training.cache.cache_dtype
    kept = training.machine.dtype if kept == "auto" else kept
    own = {
        "hidden_size": target.get("hidden_size") or 0,
        "vocab_size": target.get("vocab_size") or 0,
        "weights": sizes.weights,
        "state_bytes": 4 if kept in ("auto", "float32") else 2,
    }
    disk = Disk.of(amounts, options, training, own)
    places = {work: disk.files, cache or work: disk.states}
    if cache is None:
        places[work] = disk.files + disk.states
    for place, needed in places.items():
        there = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        free = free_bytes(place)
        if free + there < needed + _RESERVE:
            raise ValueError(
                f"the disk of {place} has {free / 1e9:.1f} GB free, and up to "
                f"{needed / 1e9:.1f} GB may be needed, {disk.states / 1e9:.1f} GB of them for the "
                "target's hidden states. Free some, name a --work folder on another disk, lower "
                "--samples or --max-tokens, or keep fewer states (slower): "
                "--train-args='--cache-gb GB'."
            )
    return disk
