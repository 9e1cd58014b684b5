"""Tiny random models that never settle into a loop, and heads for them.

A model that loops hides wrong KV, because its next token hardly depends on the context. Large
initial weights make every token depend on everything before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads

VOCAB = 512
HIDDEN = 64
STOPS = (1, 50, 100, 150, 200, 250, 300, 350)  # end tokens that a chaotic model often generates
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def save_model(
    folder: Path,
    architecture: str,
    *,
    config_name: str | None = None,
    model_name: str | None = None,
    tune: Callable[[Any], None] | None = None,
    **changes: Any,
) -> str:
    """Save a random model of a transformers architecture such as ``"Llama"``; returns its path.

    ``config_name`` and ``model_name`` are for classes not named after the architecture,
    ``tune`` changes weights; a change to None leaves that setting to transformers.
    """
    import transformers

    config_class = getattr(transformers, config_name or f"{architecture}Config")
    model_class = getattr(transformers, model_name or f"{architecture}ForCausalLM")
    settings = COMMON | changes
    config = config_class(**{name: value for name, value in settings.items() if value is not None})
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32)
    if tune is not None:
        with torch.no_grad():
            tune(model)
    model.save_pretrained(folder)
    return str(folder)


def save_config(
    folder: Path, architecture: str = "Llama", *, name: str | None = None, **changes: Any
) -> str:
    """Save the config of a model that is never loaded; returns its path.

    ``name`` is for vLLM's architectures that transformers does not have.
    """
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**COMMON | changes)
    config.architectures = [name or f"{architecture}ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def save_random_heads(
    folder: Path,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    std: float = 0.05,
    **options: Any,
) -> str:
    """Save four heads with random weights, which by default share the target's LM head."""
    torch.manual_seed(1)
    heads = MedusaHeads(4, 1, hidden, vocab, **{"num_lm_heads": 0} | options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=std)
    save_heads(folder, heads)
    return str(folder)


def save_fitted_heads(
    folder: Path,
    states: torch.Tensor,  # [M, H], the target's last hidden states; M below H
    futures: Sequence[Sequence[int]],  # M x K: the token that head h should predict for each state
) -> str:
    """Save real heads that memorized ``futures``, each token at a random rank.

    Each head is a solved LM head: fewer states than channels can be fitted exactly. A token of
    rank r (0 = best, up to 3) follows r random ones. For other states such heads are random.
    """
    count, num_heads = len(futures), len(futures[0])
    assert count < states.shape[1], "more states than channels can't be fitted"
    heads = MedusaHeads(num_heads, 1, states.shape[1], VOCAB)
    generator = torch.Generator().manual_seed(2)
    weight = heads.lm_head_weight
    assert weight is not None
    for head in range(num_heads):
        token = torch.tensor([future[head] for future in futures])
        with torch.no_grad():
            weight[head].copy_(fitted_lm_head(states, token, VOCAB, 3, generator))
    save_heads(folder, heads)
    return str(folder)


def fitted_lm_head(
    states: torch.Tensor,  # [M, H]
    token: torch.Tensor,  # int64 [M]
    vocab: int,
    worst_rank: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """The matrix [V, H] that gives each state's token a random rank, by solving for it."""
    wanted = random_ranks(token, vocab, worst_rank, generator)
    solution: torch.Tensor = torch.linalg.lstsq(states.to(torch.float64), wanted).solution
    return solution.T


def random_ranks(
    token: torch.Tensor, vocab: int, worst_rank: int, generator: torch.Generator
) -> torch.Tensor:
    """Logits, float64 [M, V], that give each token a random rank.

    The 16 tokens after it are 0.05 apart: a beam of up to that size is unaffected by rounding.
    """
    rank = torch.randint(worst_rank + 1, (len(token), 1), generator=generator)
    order = torch.rand(len(token), vocab, generator=generator)
    order.scatter_(1, token[:, None], -1.0)  # never before itself
    others = order.argsort(dim=1, descending=True)[:, : worst_rank + 16]
    place = torch.arange(worst_rank + 16)
    before = 2.0 + worst_rank - place
    behind = 0.8 - 0.05 * (place - rank)  # [M, worst_rank + 16]
    values = torch.where(place < rank, before, behind.clamp_min(0)).double()
    wanted = torch.zeros(len(token), vocab, dtype=torch.float64)
    return wanted.scatter_(1, others, values).scatter_(1, token[:, None], 1.0)
