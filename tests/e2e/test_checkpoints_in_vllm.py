"""Every format of heads in real vLLM: plain vLLM's tokens, and the acceptance of trained heads.

The test model's heads are written in each format. Equal heads must accept the same
drafts in every step; a tensor in the wrong place would not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assets import ASSETS, TARGET, VOCAB, code_prompts
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


def v2() -> Tensors:
    names = {
        f"blocks.{h}.layers.{layer}.{kind}": f"{h}.{layer}.linear.{kind}"
        for h in range(NUM_HEADS)
        for layer in range(NUM_LAYERS)
        for kind in ("weight", "bias")
    }
    return {names[name]: tensor for name, tensor in blocks().items()}


def v1() -> Tensors:
    return v2() | {f"{h}.{NUM_LAYERS}.weight": lm_head().clone() for h in range(NUM_HEADS)}


def write(folder: Path, file: str, tensors: Tensors, config: dict[str, Any] | None = None) -> str:
    folder.mkdir()
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def v1_pt(folder: Path) -> str:
    wrong = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x/y"}
    return write(folder, "medusa_lm_head.pt", v1(), wrong)  # wrong numbers, as published


def v2_file(folder: Path) -> str:
    """The path of the file itself, not of its folder."""
    return write(folder, "medusa_lm_head.safetensors", v2()) + "/medusa_lm_head.safetensors"


def vllm_token_map(folder: Path) -> str:
    """A draft vocabulary that is the target's in another order."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    mine = {"token_map": order, "lm_head.weight": lm_head()[order]}
    return write(folder, "model.safetensors", blocks() | mine, {"original_lm_head": True})


SAME = [v1_pt, v2_file, vllm_token_map]


def vllm_without_biases(folder: Path) -> str:
    weights = {name: t for name, t in blocks().items() if name.endswith("weight")}
    return write(folder, "model.safetensors", weights, {"medusa_fc_bias": False})


def vllm_small_token_map(folder: Path) -> str:
    """The most frequent tokens; the heads never draft others."""
    kept = torch.arange(0, 500)
    mine = {"token_map": kept} | {
        f"lm_heads.{h}.weight": lm_head()[kept].clone() for h in range(NUM_HEADS)
    }
    return write(folder, "model.safetensors", blocks() | mine)


def vllm_lm_head_biases(folder: Path) -> str:
    """The biases slightly favor some tokens."""
    generator = torch.Generator().manual_seed(4)
    mine = {}
    for h in range(NUM_HEADS):
        mine[f"lm_heads.{h}.weight"] = lm_head().clone()
        mine[f"lm_heads.{h}.bias"] = 0.2 * torch.randn(VOCAB, generator=generator)
    return write(folder, "model.safetensors", blocks() | mine)


OTHERS = [vllm_without_biases, vllm_small_token_map, vllm_lm_head_biases]


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


@pytest.mark.parametrize("save", SAME, ids=lambda save: save.__name__)
def test_same_heads(
    reference: Reference, expected: Steps, tmp_path: Path, save: Callable[[Path], str]
) -> None:
    assert steps_with(reference, {"model": save(tmp_path / "heads")}) == expected


@pytest.mark.parametrize("save", OTHERS, ids=lambda save: save.__name__)
def test_other_heads(
    reference: Reference, expected: Steps, tmp_path: Path, save: Callable[[Path], str]
) -> None:
    found = steps_with(reference, {"model": save(tmp_path / "heads")})
    assert found != expected and mean(found) > 0.1


def test_full_medusa_2_checkpoint(reference: Reference, expected: Steps, tmp_path: Path) -> None:
    """Heads in the target's own checkpoint: no ``model`` is set."""
    full = tmp_path / "full"
    shutil.copytree(TARGET, full)
    weights = load_file(full / "model.safetensors")
    weights |= {f"medusa_head.{name}": tensor for name, tensor in v1().items()}
    save_file(weights, full / "model.safetensors", {"format": "pt"})
    assert steps_with(reference, {}, str(full)) == expected
