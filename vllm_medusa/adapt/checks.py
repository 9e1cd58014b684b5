"""What `adapt` makes sure of before it begins: hours later would be too late."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.plan import Amounts, Plan, disk_bytes, expected_seconds
from vllm_medusa.files import digest, free_bytes, read_json, refuse_strangers, require_parent
from vllm_medusa.job import Progress, plural
from vllm_medusa.offline.defaults import Length, TargetSizes, has_template, measure, plan_engine
from vllm_medusa.offline.machine import fast_bfloat16
from vllm_medusa.offline.options import EngineOptions
from vllm_medusa.offline.prompts import Prompt, load_prompts, partition, settle_bad_lines
from vllm_medusa.options import Dtype
from vllm_medusa.training.options import TrainOptions

REPORT = "report.json"
# What adapt writes, so what it may replace.
OURS = (
    *("config.json", "model.safetensors", "calibration.safetensors", "target/"),
    *("budgets.png", "curves.png", "tree.png"),
    *("report.md", REPORT),
)
_EXTRAS = {
    "vllm": "cpu",
    "transformers": "train",
    "matplotlib": "train",
    "peft": "train",
    "accelerate": "train",
}
_RESERVE = 1 << 30  # bytes that stay free


def check(options: AdaptOptions, training: TrainOptions, progress: Progress) -> Plan:
    """Look at everything that is cheap to look at.

    Raises ValueError: something has to be changed; the message says what.
    """
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_EXTRAS[name] for name in missing}))
        raise ValueError(
            f"adapt needs {', '.join(missing)}, not installed: pip install 'vllm-medusa[{extras}]'"
        )
    _check_output(options)
    prompts = load_prompts(options.prompts, options.column, options.on_bad_line, progress)
    different = len({(p.text, p.turns, json.dumps(p.history)) for p in prompts})
    if different < 2:
        raise ValueError(
            f"{options.prompts}: {plural(different, 'different prompt')}; at least 2 are needed, "
            "one to train on and one held out, and a few hundred for heads worth having."
        )
    target = _read_target(options.target)
    options, training, why = _with_dtype(options, training)
    sizes = TargetSizes.of(options.target, options.dtype)
    lengths = _measure(prompts, options, sizes.positions, progress)
    positions = [length.positions(options.max_tokens) for length in lengths]
    room = sizes.positions or max(positions)
    amounts = Amounts.of(lengths, options.samples, options.max_tokens, room)
    engine = plan_engine(
        options.target,
        [n for n in positions for _ in range(options.samples)],
        options.batch or EngineOptions.batch,
        options.max_model_len or options.engine_args.get("max_model_len"),
        dtype=options.dtype,
        tokens=amounts.written,
    )
    files, states = disk_bytes(amounts, training, target, sizes)
    _check_disk(options, training, files, states)
    seconds = expected_seconds(amounts, options, training, target, sizes, engine)
    plan = Plan(
        options,
        training,
        target,
        different,
        digest(options.prompts),
        amounts,
        engine,
        why,
        files + states,
        seconds,
    )
    progress.note(plan.table())
    return plan


def written_by_adapt(folder: Path) -> str | None:
    """The key of the adapt whose heads a folder holds, or None."""
    try:
        return str(read_json(folder / REPORT)["key"])
    except (OSError, ValueError, KeyError):
        return None


def _check_output(options: AdaptOptions) -> None:
    """Refuse an output that can't be made, or that others need."""
    output, work = options.output, options.work_folder
    place = output.resolve()  # a link stays, and what it leads to is replaced
    if Path.cwd().is_relative_to(place):
        raise ValueError(
            f"--output {output} is the folder that this was started in, or one around it, and is "
            f"replaced as a whole. Name a folder in it, such as {output / 'heads'}."
        )
    for path in (output, place):
        require_parent(path)
    if work.resolve().is_relative_to(place):
        raise ValueError(
            f"--work {work} is in --output {output}, which is empty until the end and then "
            "replaced as a whole. Name another --work, or none: a folder beside the output."
        )
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; name a folder for the heads.")
    if output.is_dir() and any(output.iterdir()) and written_by_adapt(output) is None:
        raise ValueError(
            f"{output} holds something that adapt did not write. Name another --output, or remove "
            "it yourself."
        )
    for source in (Path(options.target), options.prompts):
        if source.exists() and source.resolve().is_relative_to(place):
            raise ValueError(
                f"{source}, which is read, is in --output {output}, which is replaced as a whole. "
                "Name another --output."
            )
    if options.overwrite and place.is_dir():
        refuse_strangers(output, OURS)


def _read_target(target: str) -> dict[str, Any]:
    """Return the target's fingerprint; its config and tokenizer have to be readable too."""
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoTokenizer

    from vllm_medusa.heads.fingerprint import target_fingerprint

    folder = Path(target).expanduser()
    if folder.is_file():
        raise ValueError(
            f"{target} is a file; adapt needs a folder as transformers saves a model, with "
            "config.json, the tokenizer and safetensors. Of a GGUF file give the model that it was "
            "made from, or save it as such a folder: AutoModelForCausalLM.from_pretrained(FOLDER, "
            "gguf_file=NAME).save_pretrained(TARGET), and its tokenizer likewise."
        )
    what = "files"
    try:
        if not folder.exists():
            kinds = ["*.safetensors", "*.json", "*.model", "*.jinja"]
            snapshot_download(target, allow_patterns=kinds)
        what = "config.json"
        config = AutoConfig.from_pretrained(target)
        what = "tokenizer"
        AutoTokenizer.from_pretrained(target)
    except Exception as error:  # transformers and its libraries raise anything
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{target} is not a model that can be read; its {what}: {reason:.300}"
        ) from None
    if config.is_encoder_decoder:
        raise ValueError(f"{target} is an encoder-decoder; heads need a decoder-only model.")
    return target_fingerprint(target)


def _with_dtype(
    options: AdaptOptions, training: TrainOptions
) -> tuple[AdaptOptions, TrainOptions, str]:
    """On a CPU, one dtype for all stages where a bfloat16 target leaves it open; and why that."""
    import torch
    from transformers import AutoConfig

    own = str(getattr(AutoConfig.from_pretrained(options.target).get_text_config(), "dtype", None))
    on_cpu = not torch.accelerator.is_available() and training.machine.device in ("auto", "cpu")
    if options.dtype != "auto" or own != "torch.bfloat16" or not on_cpu:
        return options, training, ""
    dtype: Dtype = "bfloat16"
    why = "the target's own, which this CPU multiplies natively"
    if not fast_bfloat16():
        dtype, why = "float32", "this CPU has no instructions for the target's bfloat16"
    machine = replace(training.machine, dtype=dtype)
    return replace(options, dtype=dtype), replace(training, machine=machine), why


def _measure(
    prompts: Sequence[Prompt], options: AdaptOptions, limit: int | None, progress: Progress
) -> list[Length]:
    """How long the prompts are; those that the target can't answer are bad lines."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    conversations = sum(bool(prompt.turns) for prompt in prompts)
    if conversations and not has_template(tokenizer):
        progress.warn(
            f"{options.target} has no chat template, so {plural(conversations, 'conversation')} "
            "among the prompts will be plain text, turn after turn. If the target is served with a "
            "template, put that into its folder as chat_template.jinja first."
        )
    room = None if limit is None else limit - options.num_heads - 2
    good, bad = partition(measure(prompts, tokenizer, room))
    settle_bad_lines(options.prompts, bad, options.on_bad_line, progress)
    if len(good) < 2:
        raise ValueError(
            f"{options.prompts}: {plural(len(good), 'prompt')} left; at least 2 are needed. Give "
            "shorter ones."
        )
    cut = sum(limit is not None and n.positions(options.max_tokens) > limit for n in good)
    if cut:
        progress.note(
            f"{plural(cut, 'answer')} may be cut short: with {options.max_tokens} tokens they "
            f"would not fit into the target's {limit} positions behind their prompts"
        )
    return good


def _check_disk(options: AdaptOptions, training: TrainOptions, files: int, states: int) -> None:
    """Refuse a disk on which the longest texts and their hidden states would not fit."""
    cache, work = training.cache.cache, options.work_folder
    places = {work: files + states} if cache is None else {work: files, cache: states}
    for place, needed in places.items():
        there = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        free = free_bytes(place)
        if free + there < needed + _RESERVE:
            raise ValueError(
                f"the disk of {place} has {free / 1e9:.1f} GB free, and up to "
                f"{needed / 1e9:.1f} GB may be needed, {states / 1e9:.1f} GB of them for the "
                "target's hidden states. Free some, name a --work folder on another disk, lower "
                "--samples or --max-tokens, or keep fewer states (slower): "
                "--train-args='--cache-gb GB'."
            )
