"""Heads of one recipe on held-out text and prompts: accuracies, tau, what became of the target.

tau is measured in vLLM, on seeded sampling, and the oracle (`vllm_medusa.decode`) decodes the same
prompts: tokens and the drafts accepted in each step have to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.decode import decode
from vllm_medusa.heads import load_heads
from vllm_medusa.offline.acceptance import Acceptance
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.engine import EngineSettings, Sampling
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.offline.records import Record
from vllm_medusa.sampler import draw_splitmix
from vllm_medusa.training.accuracy import label_ranks
from vllm_medusa.training.losses import IGNORED, head_labels
from vllm_medusa.training.quality import QualityMeter
from vllm_medusa.training.target import Target
from vllm_medusa.tree import TokenTree

TOPS = (1, 5)


@dataclass(frozen=True)
class Conditions:
    """What every recipe is measured under."""

    tree: TokenTree
    records: list[Record]  # held out
    prompts: list[Prompt]  # of them
    temperature: float
    max_tokens: int
    seed: int


@torch.inference_mode()
def knowledge(target: Path, heads: Path, original: Target, at: Conditions) -> dict[str, Any]:
    """Held-out accuracies of the heads, and the target beside the original."""
    new = Target.load(target)
    loaded = _load(heads, new)
    meter = QualityMeter(original.lm_head, new.lm_head)
    hits = torch.zeros(loaded.num_heads, len(TOPS), dtype=torch.int64)
    counts = torch.zeros(loaded.num_heads, dtype=torch.int64)
    for record in at.records:
        ids = torch.tensor(record.token_ids)
        states = new.hidden_states(ids[None])[0]  # [T, H]
        labels = head_labels(ids, record.generated, loaded.num_heads, own=True)
        meter.add(labels[:, 0], original.hidden_states(ids[None])[0], states)
        labels = labels[:, 1:]
        ranks = label_ranks(loaded, states, labels, new.lm_head)  # [T, K]
        known = labels != IGNORED
        counts += known.sum(0)
        for place, top in enumerate(TOPS):
            hits[:, place] += ((ranks < top) & known).sum(0)
    shares = (hits / counts[:, None]).tolist()
    return {
        "accuracy": {f"top{top}": [s[i] for s in shares] for i, top in enumerate(TOPS)},
        "labels": counts.tolist(),
        "quality": meter.result().to_dict(),
    }


def speculation(target: Path, heads: Path, at: Conditions) -> dict[str, Any]:
    """Tokens per verification step in vLLM, which must do as the oracle does.

    Raises:
        AssertionError: a token, or the drafts accepted in a step, differ.

    """
    settings = EngineSettings(
        str(target),
        {"method": "medusa", "model": str(heads), "tree": at.tree.to_lists()},
        "float32",
        1024,
        {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
    )
    sampling = Sampling(max_tokens=at.max_tokens, temperature=at.temperature)
    with EngineProcess(settings, sampling) as engine:
        results, _ = engine.run(at.prompts, 16, at.seed)
    loaded = Target.load(target)
    known = _load(heads, loaded)
    for result in results:
        _require_the_oracle_s(result, loaded, known, at)
    acceptance = Acceptance.total(result.acceptance for result in results)
    return {
        "tau": acceptance.tau,
        "steps": acceptance.steps,
        "histogram": list(acceptance.histogram),
        "tokens": sum(result.num_tokens for result in results),
        "equal_to_the_oracle": len(results),
    }


def _require_the_oracle_s(result: Result, target: Target, heads: Any, at: Conditions) -> None:
    answer = result.answers[0]
    expected = decode(
        target.model,
        heads,
        at.tree,
        torch.tensor(result.prompt.token_ids),
        at.max_tokens,
        temperature=at.temperature,
        generator=torch.Generator().manual_seed(at.seed + result.prompt.index),
        eos_token_id=target.model.generation_config.eos_token_id,
        draw=draw_splitmix,
    )
    accepted = [tokens - 1 for tokens in answer.delivered[1:]]
    name = result.prompt.request_id
    if answer.token_ids != expected.token_ids:
        raise AssertionError(f"{name}: vLLM's tokens are not the oracle's")
    # the last step may accept more than was delivered
    whole = expected.accepted_per_step
    if accepted[:-1] != whole[:-1] or (accepted and accepted[-1] > whole[-1]):
        raise AssertionError(f"{name}: vLLM accepted {accepted}, the oracle {whole}")


def _load(heads: Path, target: Target) -> Any:
    loaded, _ = load_heads(
        heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        lm_head_weight=target.lm_head_weight,
        dtype=torch.float32,
    )
    return loaded.eval()
