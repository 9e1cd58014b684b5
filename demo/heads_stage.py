"""Stage `heads`: Medusa-1 heads on the frozen target, and the tree that suits them.

Head k (0-based) reads the final hidden state of position t and predicts token t + k + 2; the
target's LM head, which all heads share, predicts token t + 1. The label is not the one token that
the text happens to have there but the target's whole distribution over it, at the temperature
that the row was sampled with: the same expected loss, with far less noise for each token of text
(self-distillation, Medusa, https://arxiv.org/abs/2401.10774, section 2.3). Because the target is
frozen, its hidden states are computed once and kept in a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm, trange
from transformers import PreTrainedModel

from demo.recipe import HeadsRecipe
from demo.target_stage import learning_rate, row_order
from vllm_medusa.heads.model import MedusaHeads

MAX_STORED_RANK = 127  # ranks beyond this are all as good as missed


@dataclass(frozen=True)
class Rows:
    """Text rows and what the frozen target makes of them."""

    ids: np.ndarray  # [R, L] uint16
    hidden_states: np.ndarray  # [R, L, H] float16, after the final norm
    temperatures: np.ndarray  # [R] float32


@torch.no_grad()
def cache_hidden_states(
    model: PreTrainedModel, ids: np.ndarray, temperatures: np.ndarray, path: Path
) -> Rows:
    """Run the target over ids [R, L], with its final hidden states in the file `path`."""
    shape = (*ids.shape, model.config.hidden_size)
    if not path.exists():
        part = path.with_suffix(".part")
        hidden = np.memmap(part, np.float16, "w+", shape=shape)
        for first in trange(0, len(ids), 8, desc=f"hidden states {path.stem}", unit="batch"):
            batch = torch.from_numpy(ids[first : first + 8].astype(np.int64))
            hidden[first : first + 8] = model.model(batch).last_hidden_state.half().numpy()
        hidden.flush()
        part.replace(path)
    return Rows(ids, np.memmap(path, np.float16, "r", shape=shape), temperatures)


def new_heads(model: PreTrainedModel, recipe: HeadsRecipe) -> MedusaHeads:
    """Untrained heads (each predicts what the target does) that share the target's LM head."""
    heads = MedusaHeads(
        recipe.num_heads,
        recipe.num_layers,
        model.config.hidden_size,
        model.config.vocab_size,
        shared_lm_head=True,
    )
    heads.use_target_lm_head(model.lm_head.weight)
    return heads.float()


def head_losses(
    heads: MedusaHeads,
    lm_head: Tensor,  # [V, H]
    hidden_states: Tensor,  # [B, L, H]
    temperatures: Tensor,  # [B]
) -> Iterator[Tensor]:
    """Yield the loss of each head: cross-entropy with the target's distribution, scalar, fp32.

    The last k + 1 positions of a row have no label for head k.
    """
    batch, length, width = hidden_states.shape
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden_states, lm_head).float()
        labels = (logits / temperatures[:, None, None]).softmax(-1)  # [B, L, V]
    x = heads(hidden_states.reshape(-1, width)).view(batch, length, -1, width)  # [B, L, K, H]
    for k in range(heads.num_heads):
        flat = x[:, : length - k - 1, k].reshape(-1, width)
        logits = torch.nn.functional.linear(flat, lm_head).float()  # [B * (L - k - 1), V]
        yield torch.nn.functional.cross_entropy(logits, labels[:, k + 1 :].flatten(0, 1))


def train_heads(
    model: PreTrainedModel,
    parts: list[Rows],
    recipe: HeadsRecipe,
    checkpoint: Path,
    *,
    seed: int,
) -> MedusaHeads:
    """Train the heads over the rows of all parts, shuffled together, `recipe.epochs` times.

    An existing `checkpoint` must be of the same parts, recipe and seed: the run goes on from it.
    """
    heads = new_heads(model, recipe)
    lm_head = model.lm_head.weight.detach().float()
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    where = [(part, row) for part in parts for row in range(len(part.ids))]
    batch_rows = max(1, recipe.batch_tokens // recipe.context)
    steps = max(1, len(where) * recipe.epochs // batch_rows)
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    order = row_order(len(where), steps * batch_rows, seed).reshape(steps, batch_rows)
    weights = torch.tensor([recipe.decay**k for k in range(recipe.num_heads)])
    average = torch.zeros(recipe.num_heads)
    bar = tqdm(range(start, steps), initial=start, total=steps, desc="heads", unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.learning_rate, recipe.warmup_steps)
        picked = [where[i] for i in order[step]]
        hidden = np.stack([part.hidden_states[row] for part, row in picked]).astype(np.float32)
        temperatures = torch.tensor([float(part.temperatures[row]) for part, row in picked])
        with torch.autocast("cpu", torch.bfloat16):
            losses = torch.stack(
                list(head_losses(heads, lm_head, torch.from_numpy(hidden), temperatures))
            )
        (losses * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = losses.detach()
        average = now if step == start else 0.98 * average + 0.02 * now
        bar.set_postfix(loss=" ".join(f"{x:.3f}" for x in average.tolist()), refresh=False)
        if (step + 1) % 200 == 0 or step + 1 == steps:
            state = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    return heads.eval()


@torch.no_grad()
def label_ranks(
    heads: MedusaHeads, lm_head: Tensor, rows: Rows, first: np.ndarray | None = None
) -> list[Tensor]:
    """Rank (0 = best) of the text's own token in every head's logits, int64 [T, K] a text row.

    One rank for each position t whose tokens up to t + K + 1 are in its text row and, with `first`
    [R], from position first - 1 on, so that no label lies in a sampled row's prompt.
    """
    num_heads, length = heads.num_heads, rows.ids.shape[1]
    out: list[Tensor] = []
    for row in range(len(rows.ids)):
        hidden = torch.from_numpy(rows.hidden_states[row].astype(np.float32))  # [L, H]
        ids = torch.from_numpy(rows.ids[row].astype(np.int64))
        start = 0 if first is None else max(0, int(first[row]) - 1)
        stop = length - num_heads - 1
        x = heads(hidden[start:stop])  # [T, K, H]
        logits = torch.nn.functional.linear(x, lm_head)  # [T, K, V]
        labels = torch.stack([ids[start + k + 2 : stop + k + 2] for k in range(num_heads)], 1)
        own = logits.gather(2, labels[..., None])
        out.append((logits > own).sum(-1).clamp(max=MAX_STORED_RANK))
    return out


def accuracies(ranks: Tensor, top: int) -> list[list[float]]:
    """For each head, the share of labels (ranks [T, K]) that it puts at rank 0, 1, ... top - 1."""
    return [
        [round(float((ranks[:, k] == rank).double().mean()), 4) for rank in range(top)]
        for k in range(ranks.shape[1])
    ]
