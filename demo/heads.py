"""Stage `heads`: distill, train, calibrate and tree of the package, on prompts from the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo.corpus import BuildError
from demo.recipe import BOS, HeadsRecipe
from vllm_medusa.calibration.calibrate import calibrate
from vllm_medusa.calibration.choose import choose_tree
from vllm_medusa.calibration.options import CalibrateOptions, TreeOptions
from vllm_medusa.files import new_file
from vllm_medusa.job import Progress
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

_SPECIAL = 3  # the first token ids
_KV_BYTES = 1 << 30


def top_level_starts(
    tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase, length: int
) -> np.ndarray:
    """Return the positions of `tokens` [T] where an unindented line starts, `length` before T.

    A prompt cut there looks like one that a person would write: it begins with code.
    """
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    ends_line = np.array([piece.endswith("\n") for piece in pieces])
    starts_code = np.array(
        [piece[:1].isidentifier() or piece.startswith(("@", "#", '"', "'")) for piece in pieces]
    )
    hit = ends_line[tokens[:-1]] & starts_code[tokens[1:]]
    positions = np.flatnonzero(hit[: max(0, len(tokens) - length)]) + 1
    if len(positions) == 0:
        raise BuildError("no unindented line among the tokens; give more source text")
    return positions


def write_prompts(
    path: Path,
    tokens: np.ndarray,  # [T] uint16 of source
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    bounds: tuple[int, int],
    seed: int,
) -> None:
    """Cut seeded prompts of so many tokens, within the bounds, each out of one source file."""
    generator = np.random.default_rng(seed)
    starts = top_level_starts(tokens, tokenizer, bounds[1])
    with new_file(path) as file:
        for number in range(count):
            start = generator.choice(starts)
            ids = tokens[start : start + generator.integers(bounds[0], bounds[1] + 1)]
            ends = np.flatnonzero(ids < _SPECIAL)  # the next file
            text = tokenizer.decode(ids[: ends[0]] if len(ends) else ids)
            file.write(json.dumps({"id": f"prompt-{number}", "prompt": f"{BOS}{text}"}) + "\n")


def make_heads(
    target: Path,
    output: Path,
    work: Path,
    tokens: np.ndarray,  # [T] uint16 of source to train on
    heldout: np.ndarray,  # and of other files
    recipe: HeadsRecipe,
    seed: int,
    progress: Progress,
) -> float:
    """Let the target write, train heads on that, choose their tree; returns its tau.

    Each job goes on where it was stopped; engines run in processes of their own.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = {"train": recipe.temperatures, "heldout": (recipe.tree_temperature,)}
    samples = len(recipe.temperatures)
    counts = {"train": max(1, recipe.tokens // recipe.max_tokens // samples)}
    counts["heldout"] = recipe.heldout_prompts
    records = {}
    for name, source in (("train", tokens), ("heldout", heldout)):
        prompts, records[name] = work / f"{name}-prompts.jsonl", work / f"{name}.jsonl"
        if not prompts.exists():
            write_prompts(prompts, source, tokenizer, counts[name], recipe.prompt_tokens, seed)
        asked = DistillOptions(
            model=str(target),
            files=RecordFiles(prompts=prompts, output=records[name]),
            sampling=TextOptions(
                samples=len(texts[name]),
                max_tokens=recipe.max_tokens,
                temperature=texts[name],
                seed=seed,
            ),
            engine=BatchOptions(
                dtype="float32",
                engine_args={"enforce_eager": True, "kv_cache_memory_bytes": _KV_BYTES},
            ),
        )
        run_in_process(distill, asked, progress, log=work / "distill.log")
    train(
        TrainOptions(
            model=str(target),
            files=TextFiles(data=records["train"], heldout=records["heldout"], output=output),
            heads=HeadOptions(num_heads=recipe.num_heads, num_layers=recipe.num_layers),
            training=StepOptions(
                epochs=recipe.epochs,
                batch_tokens=recipe.batch_tokens,
                learning_rate=recipe.learning_rate,
                seed=seed,
            ),
        ),
        progress,
    )
    calibrate(CalibrateOptions(model=str(target), heads=output, data=records["heldout"]), progress)
    nodes = recipe.tree_draft_tokens
    return choose_tree(TreeOptions(heads=output, num_draft_tokens=nodes), progress).walked.tau
