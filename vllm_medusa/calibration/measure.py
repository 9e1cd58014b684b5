"""Tokens per step as they really come: prompts decoded with the tree, by the oracle.

Lossless sampling at the calibration's temperature is what the walks foretell (greedy, if that is
0), so the estimates can be held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from vllm_medusa.calibration.measured import Measured
from vllm_medusa.decode import decode
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.tree.topology import TokenTree


def measure(
    model: Any,  # a causal LM of transformers, on the heads' device
    heads: MedusaHeads,
    tree: TokenTree,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    samples: int = 1,
    end_tokens: Collection[int] = (),
    progress: Callable[[int], object] = lambda texts: None,
) -> Measured:
    """Decode ``samples`` texts of every prompt (token ids); text i has the seed ``seed + i``."""
    device = model.get_input_embeddings().weight.device
    accepted, steps = [], []
    for prompt, ids in enumerate(prompts):
        results = []
        for number in range(prompt * samples, (prompt + 1) * samples):
            result = decode(
                model,
                heads,
                tree,
                torch.tensor(ids, device=device),
                max_new_tokens,
                temperature=temperature,
                generator=torch.Generator(device).manual_seed(seed + number),
                eos_token_id=end_tokens,
            )
            results.append(result.accepted_per_step)
            progress(1)
        accepted.append(sum(map(sum, results)))
        steps.append(sum(map(len, results)))
    return Measured(tuple(accepted), tuple(steps))
