"""Checks before an adapt run, and what the run requires: tokens, memory, disk space and time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.files import (
    digest,
    digest_json,
    free_bytes,
    read_json,
    refuse_strangers,
    require_output,
)
from vllm_medusa.job import Progress, duration, plural
from vllm_medusa.offline.defaults import (
    EnginePlan,
    Length,
    TargetSizes,
    measure,
    plan_engine,
    readable,
)
from vllm_medusa.offline.engine import start_seconds
from vllm_medusa.offline.machine import fast_bfloat16
from vllm_medusa.offline.prompts import Prompt, load_prompts
from vllm_medusa.options import Dtype, values_of

REPORT = "report.json"
# Files that adapt writes, and so may replace.
OURS = (
    *("config.json", "model.safetensors", "calibration.safetensors", "target/"),
    *("curves.png", "report.md", REPORT),
)
_NEEDED = ("vllm", "transformers", "matplotlib", "peft", "accelerate")
_RESERVE = 1 << 30  # bytes to leave free
_RECORD_BYTES = 16  # per token in a file of records: its id and its text
_FEW_TOKENS = 50_000  # new tokens; Medusa heads for SmolLM2 trained on 101k have tau 1.35
_SHARE = 0.5  # assumed fraction of the speed of large matrix products
_JOINT_PASSES = 4  # passes of the target over a text in medusa-2's joint stage


@dataclass(frozen=True)
class Plan:
    """A validated adapt run: its options and the results of the checks."""

    options: AdaptOptions
    target: dict[str, Any]  # its fingerprint
    prompts_digest: str
    engine: EnginePlan  # for generating the texts

    @property
    def key(self) -> str:
        """A digest of everything that the result depends on."""
        places = dict.fromkeys(("target", "prompts", "output", "overwrite", "work", "dry_run"))
        settings = values_of(self.options) | places
        return digest_json([settings, self.target, self.prompts_digest])[:12]


def check(options: AdaptOptions, progress: Progress) -> Plan:
    """Run all cheap checks, and report the resources that the job needs."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(
            f"adapt needs {', '.join(missing)}: pip install 'vllm-medusa[cpu,train]', with a GPU "
            "'vllm-medusa[cuda,train]'."
        )
    from vllm_medusa.training.inputs import find_start

    _check_output(options)
    find_start(options.heads)
    prompts = load_prompts(options.prompts, options.column, options.on_bad_line, progress)
    different = len({(p.text, p.turns, json.dumps(p.history)) for p in prompts})
    if different < 2:
        raise ValueError(
            f"{options.prompts}: {plural(different, 'distinct prompt')}; at least 2 are needed, "
            "one to train on and one held out, and a few hundred for useful heads."
        )
    target, config, tokenizer = _read_target(options.target)
    options, why = _with_dtype(options, config)
    sizes = TargetSizes.of(options.target, options.dtype)
    given = options.max_model_len or options.engine_args.get("max_model_len")
    limits = [n for n in (given, sizes.positions) if isinstance(n, int) and n > 0]
    lengths = _measure(prompts, options, tokenizer, min(limits, default=None), progress)
    positions = [length.positions(options.max_tokens) for length in lengths]
    work = Work(options, target, sizes, lengths, min(limits, default=max(positions)))
    engine = plan_engine(
        options.target,
        [n for n in positions for _ in range(options.samples)],
        work.batch,
        given,
        dtype=options.dtype,
        tokens=work.written,
    )
    eager = "enforce_eager" in engine.arguments
    files, states = work.disk_bytes()
    _check_disk(options, files, states)
    seconds = work.seconds(eager=eager)
    about = {name: duration(time) for name, time in seconds.items()}
    texts, batch = options.samples * len(lengths), work.batch
    memory = "" if engine.memory is None else f", {engine.memory / 1e9:.1f} GB of memory"
    chats = tokenizer.chat_template is not None and any(prompt.turns for prompt in prompts)
    chat = ", chats in the model's chat template" if chats else ""
    progress.note(
        f"about {duration(sum(seconds.values()))} in all if no answer ends early, less what is "
        f"already done; up to {(files + states) / 1e9:.2g} GB of disk in {options.work_folder}\n"
        f"  dtype    {options.dtype}{f' ({why})' * bool(why)}\n"
        f"  distill  {texts} texts of up to {options.max_tokens} new tokens (prompts: "
        f"{work.prompts} tokens{chat}), {batch} at a time by vLLM "
        f"({'eager' if eager else 'compiled'}{memory}): about {about['distill']}\n"
        f"  train    {options.heads.kind}, {plural(options.training.epochs, 'epoch')}: about "
        f"{about['train']}\n"
        f"  compare  vLLM with it against plain vLLM: about {about['compare']}\n"
        "  Lower --max-tokens or --epochs to shorten it."
    )
    if work.written < _FEW_TOKENS and options.heads.start_heads is None:
        progress.warn(
            f"{plural(texts, 'text')} with at most {work.written} new tokens in all turns are few "
            "to train on, so tau will be low. Use more prompts, --samples or --max-tokens."
        )
    return Plan(options, target, digest(options.prompts), engine)


def written_by_adapt(folder: Path) -> str | None:
    """The key of the adapt run that made the heads in a folder, or None."""
    try:
        return str(read_json(folder / REPORT)["key"])
    except (OSError, ValueError, KeyError):
        return None


def _check_output(options: AdaptOptions) -> None:
    """Refuse an output that can't be made, or that contains inputs."""
    output = options.output
    inputs: dict[str, str | Path] = {
        "the current folder": Path.cwd(),
        "--work": options.work_folder,
        "the target": options.target,
        "--prompts": options.prompts,
    }
    require_output(output, inputs)
    if output.resolve().is_mount():
        raise ValueError(
            f"--output {output} is a mount point, which can't be replaced as a whole. Use a folder "
            f"in it, such as {output / 'heads'}."
        )
    empty = not output.exists() or not any(output.iterdir())
    if not empty and written_by_adapt(output) is None:
        raise ValueError(
            f"{output} holds files that adapt did not write. Choose another --output, or remove "
            "them yourself."
        )
    if options.overwrite and not empty:
        refuse_strangers(output, OURS)


def _read_target(target: str) -> tuple[dict[str, Any], Any, Any]:
    """A target's fingerprint, config and tokenizer."""
    from transformers import AutoTokenizer

    from vllm_medusa.training.inputs import identify

    config, fingerprint, _ = identify(target)
    with readable(target):
        tokenizer = AutoTokenizer.from_pretrained(target)
    if config.is_encoder_decoder:
        raise ValueError(f"{target} is an encoder-decoder model; heads need a decoder-only model.")
    return fingerprint, config, tokenizer


def _with_dtype(options: AdaptOptions, config: Any) -> tuple[AdaptOptions, str]:
    """Replace dtype "auto" for a bfloat16 target on a CPU; returns options and reason."""
    import torch

    own = str(getattr(config, "dtype", None))
    if options.dtype != "auto" or own != "torch.bfloat16" or torch.accelerator.is_available():
        return options, ""
    dtype: Dtype = "bfloat16"
    why = "the target's own, with native instructions on this CPU"
    if not fast_bfloat16():
        dtype, why = "float32", "this CPU has no instructions for the target's bfloat16"
    return replace(options, dtype=dtype), why


def _measure(
    prompts: Sequence[Prompt],
    options: AdaptOptions,
    tokenizer: Any,
    limit: int | None,  # positions of the target
    progress: Progress,
) -> list[Length]:
    """Lengths of the prompts; those that the target can't answer are bad lines."""
    room = None if limit is None else limit - options.heads.num_heads - 2
    lengths = measure(
        options.prompts, prompts, tokenizer, room, options.on_bad_line, progress
    ).values()
    if len(lengths) < 2:
        raise ValueError(
            f"{options.prompts}: {plural(len(lengths), 'prompt')} left; at least 2 are needed. Use "
            "shorter ones."
        )
    return list(lengths)


def _check_disk(options: AdaptOptions, files: int, states: int) -> None:
    """Refuse a disk that can't hold the longest texts and their hidden states."""
    cache, work = options.cache.cache, options.work_folder
    places = {work: files + states} if cache is None else {work: files, cache: states}
    for place, needed in places.items():
        there = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        free = free_bytes(place)
        if free + there < needed + _RESERVE:
            raise ValueError(
                f"the disk of {place} has {free / 1e9:.1f} GB free, but up to "
                f"{(needed + _RESERVE) / 1e9:.1f} GB may be needed: {files / 1e9:.2f} GB for texts "
                f"and heads, {states / 1e9:.2f} GB for the target's hidden states and "
                f"{_RESERVE / 1e9:.1f} GB to spare. Free space, use a --work folder on another "
                "disk, lower --samples or --max-tokens, or keep fewer states (slower): "
                "--cache-gb GB."
            )


class Work:
    """The size of an adapt run.

    Attributes:
        prompts: number of prompt tokens, with ``samples`` texts per prompt.
        written: max number of answer tokens.
        batch: max number of concurrent texts.

    """

    def __init__(
        self,
        options: AdaptOptions,
        target: dict[str, Any],  # fingerprint
        sizes: TargetSizes,
        lengths: Sequence[Length],
        room: int,  # max positions of a text
    ) -> None:
        self.options, self.sizes = options, sizes
        self.hidden, self.vocab = target.get("hidden_size") or 0, target.get("vocab_size") or 0
        wholes = [(min(n.whole, room), min(n.positions(options.max_tokens), room)) for n in lengths]
        texts, seqs = options.samples * len(wholes), options.engine_args.get("max_num_seqs")
        self.batch = min(options.batch, texts)
        if isinstance(seqs, int) and seqs > 0:
            self.batch = min(self.batch, seqs)
        self.prompts = options.samples * sum(before for before, _ in wholes)
        self.written = options.samples * sum(after - before for before, after in wholes)

    def head_values(self, vocab: int) -> int:
        """Approximate number of the drafter's weights, with LM heads of ``vocab`` rows."""
        heads, hidden = self.options.heads, self.hidden
        if heads.kind == "eagle3":
            return 16 * hidden * hidden + vocab * hidden
        return heads.num_heads * (heads.num_layers * hidden + vocab) * hidden

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of all files except hidden states, and bytes of hidden states."""
        options, tokens = self.options, self.prompts + self.written
        heads = options.heads
        values = self.head_values(self.vocab if heads.own_lm_heads else 0)
        files = 4 * 6 * values  # state, copies, result
        files += 2 * self.sizes.weights * (options.method == "medusa-2")
        files += 2 * tokens * _RECORD_BYTES
        width = 4 if options.dtype in ("auto", "float32") else 2
        rows = 4 * tokens if options.heads.kind == "eagle3" else self.written
        return files, min(rows * self.hidden * width, int(options.cache.cache_gb * 1e9))

    def seconds(self, *, eager: bool) -> dict[str, float]:
        """Estimated times of the longer stages, within a factor of about two."""
        options, start = self.options, start_seconds({"enforce_eager": eager})
        flops, bandwidth = _speeds(options.dtype)
        token = 2 * self.sizes.values / flops  # seconds per token of the target, in large batches
        step = max(self.sizes.weights / bandwidth, self.batch * token)
        row = 6 * self.head_values(min(self.vocab, 16_384)) / flops
        read, epochs = (self.prompts + self.written) * token, options.training.epochs
        if options.method == "medusa-2":  # forward passes of both targets, backward of one
            read *= 1 + _JOINT_PASSES * options.joint.joint_epochs
            epochs += options.joint.joint_epochs
        engines = 2 + len(set(options.budgets))  # plain, automatic, and each budget
        return {
            "distill": start + self.prompts * token + self.written / self.batch * step,
            "train": read + epochs * self.written * row,
            "compare": options.measure_seconds + engines * start_seconds(options.engine_args),
        }


def _speeds(dtype: Dtype) -> tuple[float, float]:
    """Achievable operations and bytes per second of this machine."""
    import torch
    from torch.utils.benchmark import Timer

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    values = {"a": torch.ones(1024, 1024, device=device), "b": torch.ones(1 << 24, device=device)}
    if dtype == "bfloat16" and fast_bfloat16():
        values["a"] = values["a"].bfloat16()

    def seconds(work: str) -> float:
        timer = Timer(work, globals=values, num_threads=torch.get_num_threads())
        return float(timer.timeit(3).mean)

    product, read = seconds("a @ a"), seconds("b.sum()")
    return _SHARE * 2 * 1024**3 / product, _SHARE * values["b"].nbytes / read
