"""Makes a target that writes JSON, and heads for it: `grammar` is counted on it, too.

    python -m benchmarks json_target tests/assets/target build/json
    python -m benchmarks grammar build/json/target build/json/heads --eager

The small model goes on training for minutes, on documents of `benchmarks.schemas` with random
values below the prompts that `grammar` asks with. Then it writes for those prompts itself, and
heads are trained on that by the package's own jobs.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.grammar import ASKED
from benchmarks.schemas import SCHEMAS
from vllm_medusa.job import Progress
from vllm_medusa.options import Above, Options, Positive, Seed, option

_PLACES = "Paris Berlin Madrid Rome Vienna Oslo Lisbon Dublin Prague Athens Boston Austin"
_NAMES = "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karl Lena Mia Noah Olga Paul"
_WORDS = (
    "the a new old small test file user list value error change function returns fails when not "
    "reads writes empty first last index cache page query server client config check add remove "
    "update before after every missing wrong data type table result please look here this is"
)


class JsonTargetOptions(Options):
    """What is made of which model."""

    target: Path = option("folder of the small model", positional=True)
    output: Path = option("folder for target/ and heads/", positional=True)
    documents: Positive = option("to train on", default=3000)
    batch: Positive = option("documents a step", default=12)
    learning_rate: Above = option(default=1e-3)
    texts: Positive = option("that the new target writes, to train heads on", default=1000)
    seed: Seed = option(default=0)


def run(options: JsonTargetOptions, progress: Progress) -> Iterator[Row]:
    """A row for the target and one for its heads."""
    rng = random.Random(options.seed)
    asked = [rng.choice(list(SCHEMAS)) for _ in range(options.documents)]
    texts = [ASKED.format(schema=s) + json.dumps(document(SCHEMAS[s], rng)) for s in asked]
    target, heads = options.output / "target", options.output / "heads"
    nats = _train_target(options, texts, target, progress)
    yield Row({"name": "target"}, {"nats": nats}, right=True)
    prompts = _beginnings(texts[: options.texts], rng)
    tau = _train_heads(options, prompts, target, heads, progress)
    yield Row({"name": "heads"}, {"tau": tau}, right=True)


def document(schema: dict[str, Any], rng: random.Random, key: str = "") -> Any:
    """Random values that follow a schema of `benchmarks.schemas`; ``key`` is what they are for."""
    if "anyOf" in schema:
        return document(rng.choice(schema["anyOf"]), rng)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return {name: document(each, rng, name) for name, each in schema["properties"].items()}
    if kind == "array":
        count = rng.randint(schema["minItems"], schema["maxItems"])
        return [document(schema["items"], rng, key) for _ in range(count)]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randint(1, 10 ** rng.randint(1, 4))
    return _string(key, rng)[: schema["maxLength"]].strip()


def _string(key: str, rng: random.Random) -> str:
    if key in ("path", "directory"):
        words = rng.sample(_WORDS.split(), rng.randint(1, 3))
        return "/".join(words) + (".py" if key == "path" else "")
    if key == "email":
        return f"{rng.choice(_NAMES.split()).lower()}@{rng.choice(_WORDS.split())}.org"
    if key == "host":
        return f"{rng.choice(_WORDS.split())}-{rng.choice(string.digits)}.local"
    if key in ("location", "city"):
        return rng.choice(_PLACES.split())
    if key in ("first_name", "last_name", "name"):
        return rng.choice(_NAMES.split())
    return " ".join(
        rng.choices(_WORDS.split(), k=rng.randint(2, 40 if key == "body" else 10))
    ).capitalize()


def _train_target(
    options: JsonTargetOptions, texts: list[str], output: Path, progress: Progress
) -> float:
    """Train on whole documents; returns the loss of the last tenth of the steps."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_medusa.training.loop import rate_at

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.05)
    rows = []
    for number, text in enumerate(texts):  # as one text and as a prompt and its answer
        parts = [text] if number % 2 else [text[: _start(text)], text[_start(text) :]]
        tokens = [token for part in parts for token in tokenizer.encode(part)]
        rows.append(torch.tensor([*tokens, tokenizer.eos_token_id]))
    steps, losses = max(1, len(rows) // options.batch), []
    for step in range(steps):
        part = rows[step * options.batch : (step + 1) * options.batch]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-100)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate_at(step, steps, 20)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids.clamp_min(0)).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.at("target", step + 1, steps, f"loss {losses[-1]:.3f}")
    model.eval().save_pretrained(output)
    tokenizer.save_pretrained(output)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def _start(text: str) -> int:
    """Where the document begins."""
    return text.index("= ") + 2


def _beginnings(texts: list[str], rng: random.Random) -> list[str]:
    """Each up to some place in its document, half of them up to where it begins."""
    found = []
    for text in texts:
        start = _start(text)
        found.append(text[: rng.choice((start, rng.randint(start, len(text))))])
    return found


def _train_heads(
    options: JsonTargetOptions, prompts: list[str], target: Path, heads: Path, progress: Progress
) -> float:
    """Distill, train and calibrate; returns the tokens per step of a large tree."""
    from vllm_medusa.calibration.calibrate import calibrate
    from vllm_medusa.calibration.options import CalibrateOptions
    from vllm_medusa.offline.children import run_in_process
    from vllm_medusa.offline.options import BatchOptions
    from vllm_medusa.training.distill import distill
    from vllm_medusa.training.options import (
        DistillOptions,
        HeadOptions,
        RecordFiles,
        StepOptions,
        TextFiles,
        TextOptions,
        TrainOptions,
    )
    from vllm_medusa.training.train import train

    asked_file, records = options.output / "prompts.jsonl", options.output / "records.jsonl"
    asked_file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    asked = DistillOptions(
        model=str(target),
        files=RecordFiles(prompts=asked_file, output=records),
        sampling=TextOptions(max_tokens=256, temperature=(0.8,), seed=options.seed),
        engine=BatchOptions(
            dtype="float32",
            engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
        ),
    )
    run_in_process(distill, asked, progress, log=options.output / "distill.log")
    train(
        TrainOptions(
            model=str(target),
            files=TextFiles(data=records, output=heads),
            heads=HeadOptions(num_layers=1),
            training=StepOptions(seed=options.seed),
        ),
        progress,
    )
    seen = CalibrateOptions(model=str(target), heads=heads, data=heads / "training/heldout.jsonl")
    return calibrate(seen, progress).tau


CASE = Case(
    JsonTargetOptions,
    run,
    {"name": ("made", ""), "nats": ("nats a token", ".3f"), "tau": ("tau of 63 nodes", ".2f")},
    quick={"documents": 120, "texts": 40},
)
