"""Other forms of heads in real vLLM: plain vLLM's tokens, and the acceptance of trained heads.

Equal heads must accept the same drafts in every step; with a tensor in the wrong place they would
not. That every format is read as the same heads is tested in `unit/heads/test_checkpoint.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.assets import ASSETS, TARGET, code_prompts
from support.engines import complete, engine, greedy
from support.reference import Reference, differing, plain_greedy
from support.spies import accepted_per_step, recorded_steps
from torch import Tensor

pytestmark = pytest.mark.engine

HEADS = ASSETS / "heads"
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0, 0]]
TOKENS = 40
CONFIG = json.loads((HEADS / "config.json").read_text())
NUM_HEADS, NUM_LAYERS = CONFIG["num_heads"], CONFIG["num_hidden_layers"]
Tensors = dict[str, Tensor]
Steps = list[list[int]]  # accepted drafts, per prompt and step


def blocks() -> Tensors:
    """The residual layers of the test model's heads, in vLLM's names, without LM heads."""
    return load_file(HEADS / "model.safetensors")


def lm_head() -> Tensor:
    return load_file(Path(TARGET) / "model.safetensors")["model.embed_tokens.weight"]  # tied


def v1() -> Tensors:
    """In the reference's names, with LM heads."""
    tensors = {f"{h}.{NUM_LAYERS}.weight": lm_head().clone() for h in range(NUM_HEADS)}
    for name, tensor in blocks().items():
        _, head, _, layer, kind = name.split(".")
        tensors[f"{head}.{layer}.linear.{kind}"] = tensor
    return tensors


@pytest.fixture(scope="module")
def reference() -> Reference:
    with engine(TARGET) as llm:
        return plain_greedy(llm, code_prompts(12, 22), TOKENS)


def steps_with(reference: Reference, config: dict[str, Any], model: str = TARGET) -> Steps:
    """Check the tokens; return the accepted drafts."""
    options = {"method": "medusa", "tree": TREE} | config
    with engine(model, options) as llm, recorded_steps() as steps:
        got = complete(llm, reference.prompts, greedy(TOKENS))
    assert differing(reference.completions, got) == []
    return [accepted_per_step(steps, prompt) for prompt in reference.prompts]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Steps:
    return steps_with(reference, {"model": str(HEADS)})


def mean(steps: Steps) -> float:
    accepted = [count for prompt in steps for count in prompt]
    return sum(accepted) / len(accepted)


def test_the_heads_predict(reference: Reference, expected: Steps) -> None:
    assert len(reference.prompts) >= 6
    assert mean(expected) > 0.5


def test_full_medusa_2_checkpoint(reference: Reference, expected: Steps, tmp_path: Path) -> None:
    """Heads in the target's own checkpoint: no ``model`` is set."""
    full = tmp_path / "full"
    shutil.copytree(TARGET, full)
    weights = load_file(full / "model.safetensors")
    weights |= {f"medusa_head.{name}": tensor for name, tensor in v1().items()}
    save_file(weights, full / "model.safetensors", {"format": "pt"})
    assert steps_with(reference, {}, str(full)) == expected
