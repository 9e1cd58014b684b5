"""Without seeds: the tokens emitted together in a step follow the target's joint distribution.

Pearson's statistic over all strings of three tokens, against exact probabilities from the
target. The drafts come from heads that resemble the target, so most steps accept. Not on V2, which
gives requests without a seed a random one: seeded ones equal plain vLLM's there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chi_square import UNLIKELY, deviations
from support.engines import complete, engine, medusa
from support.models import save_model, save_random_heads
from support.spies import mean_accepted, recorded_steps
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine

V = 8
SAMPLES = 4000
SPREAD = 0.12  # of the target's weights
PROMPT = [3, 1, 0, 3, 2]
TREE = {"dense": [3, 2]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("small_vocabulary")
    return save_model(folder, "Llama", vocab_size=V, initializer_range=SPREAD)


@pytest.fixture(scope="module")
def llm(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    heads = save_random_heads(tmp_path_factory.mktemp("heads"), vocab=V)
    with engine(target, medusa(heads, TREE), max_num_seqs=256) as llm:
        yield llm


def joint(target: str, temperature: float) -> Tensor:
    """Exact probability of every continuation [V ** 3], from transformers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    strings = torch.tensor(list(product(range(V), repeat=3)))
    prompt = torch.tensor(PROMPT).expand(len(strings), -1)
    with torch.inference_mode():
        logits = model(torch.cat([prompt, strings], 1)).logits[:, len(PROMPT) - 1 : -1]
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(2, strings[..., None]).squeeze(2).sum(1).exp()


def sample(llm: LLM, temperature: float, **options: Any) -> tuple[Tensor, float]:
    """Counts of all strings of three tokens, and the drafts accepted per verified tree."""
    params = SamplingParams(
        temperature=temperature, max_tokens=3, ignore_eos=True, detokenize=False, **options
    )
    with recorded_steps() as steps:
        got = complete(llm, [PROMPT] * SAMPLES, params)
    strings = torch.tensor([completion.token_ids for completion in got])
    places = strings @ torch.tensor([V * V, V, 1])
    return torch.bincount(places, minlength=V**3), mean_accepted(steps)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_joint_distribution(llm: LLM, target: str, temperature: float) -> None:
    observed, accepted = sample(llm, temperature)
    assert accepted > 0.4
    assert deviations(observed, joint(target, temperature)) < 3.1  # p = 1e-3
    assert deviations(observed, joint(target, 1.5 * temperature)) > UNLIKELY  # a wrong one


def test_the_statistic_detects_typical_acceptance(llm: LLM, target: str) -> None:
    """Typical acceptance is not lossless; if it passed here, the statistic would detect nothing."""
    observed, accepted = sample(llm, 1.0, extra_args={"medusa": {"acceptance": "typical"}})
    assert accepted > 0.6
    assert deviations(observed, joint(target, 1.0)) > UNLIKELY
