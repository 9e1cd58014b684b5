"""Without seeds: the tokens emitted together in a step follow the target's joint distribution.

Pearson's statistic over all strings of three tokens, against exact probabilities from the
target. The drafts come from heads that resemble the target, so most steps accept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import complete, engine, medusa
from support.models import save_model, save_random_heads
from support.spies import mean_accepted, recorded_steps
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine

V = 8
SAMPLES = 4000
PROMPT = [3, 5, 4, 7, 6]
TREE = {"dense": [3, 2]}
Joint = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("small_vocabulary")
    return save_model(folder, "Llama", vocab_size=V, initializer_range=0.12)


@pytest.fixture(scope="module")
def llm(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    heads = save_random_heads(tmp_path_factory.mktemp("heads"), vocab=V)
    with engine(target, medusa(heads, TREE), max_num_seqs=256) as llm:
        yield llm


def joint(target: str, temperature: float, tokens: int = 3) -> Joint:
    """Exact probability of every continuation, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    strings = torch.tensor(list(product(range(V), repeat=tokens)))
    prompt = torch.tensor(PROMPT).expand(len(strings), -1)
    with torch.inference_mode():
        logits = model(torch.cat([prompt, strings], 1)).logits[:, len(PROMPT) - 1 : -1]
    logp = (logits.double() / temperature).log_softmax(-1)
    total = logp.gather(2, strings[..., None]).squeeze(2).sum(1).exp()
    return {tuple(s): p for s, p in zip(strings.tolist(), total.tolist(), strict=True)}


def sample(llm: LLM, temperature: float, **options: Any) -> tuple[list[tuple[int, ...]], float]:
    """Strings of three tokens, and the drafts accepted per verified tree."""
    params = SamplingParams(
        temperature=temperature, max_tokens=3, ignore_eos=True, detokenize=False, **options
    )
    with recorded_steps() as steps:
        got = complete(llm, [PROMPT] * SAMPLES, params)
    return [completion.token_ids for completion in got], mean_accepted(steps)


def p_value(observed: list[tuple[int, ...]], expected: Joint) -> float:
    """Of Pearson's statistic, by Wilson and Hilferty; cells below 5 are pooled."""
    counts = dict.fromkeys(expected, 0)
    for string in observed:
        counts[string] += 1
    cells, rest = [], [0.0, 0.0]
    for string, probability in expected.items():
        cell = [counts[string], probability * len(observed)]
        if cell[1] < 5:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
        else:
            cells.append(cell)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    freedom = len(cells) - 1
    assert freedom > 50, "too few cells for the statistic"
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_joint_distribution(llm: LLM, target: str, temperature: float) -> None:
    observed, accepted = sample(llm, temperature)
    assert accepted > 0.4
    assert p_value(observed, joint(target, temperature)) > 1e-3


def test_the_statistic_detects_a_wrong_temperature(llm: LLM, target: str) -> None:
    observed, _ = sample(llm, 1.0)
    assert p_value(observed, joint(target, 1.3)) < 1e-6


def test_the_statistic_detects_typical_acceptance(llm: LLM, target: str) -> None:
    """It is not lossless; if it passed here, the test could not fail."""
    observed, accepted = sample(llm, 1.0, extra_args={"medusa": {"acceptance": "typical"}})
    assert accepted > 0.6
    assert p_value(observed, joint(target, 1.0)) < 1e-6
