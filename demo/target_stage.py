"""Stages `tokenizer` and `target`: a byte-level BPE and a small Llama, from text alone."""

import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import BuildError, rows
from demo.recipe import BOS, EOS, PAD, TargetRecipe
from vllm_medusa.files import new_path
from vllm_medusa.job import SILENT, Progress

CHECKPOINT_EVERY = 100  # steps
TIMED_STEPS = 20  # what --minutes measures before it fixes the number of steps


def train_tokenizer(texts: Iterator[str], vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE and write it, in the layout of transformers, to the folder `out`.

    Indentation (all but its last space), newlines and digits never merge with words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" {2,}(?= )|\n+|\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    fast.save_pretrained(out)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up over at most a tenth of the run, then a cosine down to zero."""
    warmup = min(warmup, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def new_target(recipe: TargetRecipe, seed: int) -> LlamaForCausalLM:
    """Build the target with seeded random fp32 weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).float()


def optimizer_for(model: LlamaForCausalLM, recipe: TargetRecipe) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)


def row_order(num_rows: int, count: int, seed: int) -> np.ndarray:
    """Return `count` row numbers: whole seeded permutations of the rows, one after another."""
    generator = np.random.default_rng(seed)
    passes = [generator.permutation(num_rows) for _ in range(-(-count // num_rows))]
    return np.concatenate(passes)[:count]


def token_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy (nats) of int64 ids [B, L], scalar, computed in fp32."""
    logits = model(ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, tokens: np.ndarray, context: int) -> float:
    """Mean cross-entropy in nats a token over rows of `context` of the held-out stream [T]."""
    ids = torch.from_numpy(rows(tokens, context).astype(np.int64))
    return sum(float(token_loss(model, part)) * len(part) for part in ids.split(16)) / len(ids)


def train_target(
    tokens: np.ndarray,  # [T] uint16
    recipe: TargetRecipe,
    num_tokens: int,
    checkpoint: Path,
    *,
    minutes: float | None,
    seed: int,
    progress: Progress = SILENT,
) -> LlamaForCausalLM:
    """Train the target; with an unfinished `checkpoint` of the same run, go on from there.

    `minutes` shortens the run: its first steps are timed and fix how many there will be.
    Raises BuildError when the checkpoint belongs to a run with other settings.
    """
    data = rows(tokens, recipe.context)
    steps = max(1, num_tokens // (recipe.batch_size * recipe.context))
    model = new_target(recipe, seed).train()
    optimizer = optimizer_for(model, recipe)
    asked: dict[str, Any] = {"tokens": num_tokens, "minutes": minutes or 0.0, "seed": seed}
    asked["data"] = hashlib.sha256(data.tobytes()).hexdigest()
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["asked"] != asked:
            raise BuildError(
                f"{checkpoint} is of a run with {state['asked']}, this one has {asked}; "
                "repeat that run's options to go on with it, or delete the file to begin anew"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, steps = state["step"], state["steps"]
    order = row_order(len(data), steps * recipe.batch_size, seed).reshape(steps, -1)
    began, average = time.monotonic(), 0.0
    for step in range(start, steps):
        if step >= steps:
            break  # --minutes has shortened the run
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.learning_rate, recipe.warmup_steps)
        ids = torch.from_numpy(data[order[step]].astype(np.int64))  # [B, L]
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if step == start else 0.98 * average + 0.02 * loss.item()
        progress.at("target", step + 1, steps, f"loss {average:.3f}")
        if minutes and step + 1 == TIMED_STEPS and start == 0:
            steps = min(steps, int(TIMED_STEPS * minutes * 60 / (time.monotonic() - began)))
            steps = max(steps, TIMED_STEPS)
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"step": step + 1, "steps": steps, "asked": asked}
            with new_path(checkpoint) as part:
                torch.save(state, part)
    return model.eval()
