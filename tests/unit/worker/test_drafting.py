"""The drafter of vLLM's workers packs the heads that its tree uses, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from support.one_rank import one_rank
from support.random_heads import HIDDEN, VOCAB, random_heads, write

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.tree import TokenTree
from vllm_medusa.worker import compat
from vllm_medusa.worker.drafting import MedusaDrafter
from vllm_medusa.worker.options import EngineOptions


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("ranks") / "store"):
        yield


@pytest.mark.parametrize("num_lm_heads", [5, 0])
def test_five_heads_trained_and_three_used_cost_what_three_cost(
    num_lm_heads: int, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[int] = []
    products: list[int] = []
    original = compat.packed_linear

    def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        size = weight.numel()  # read once for each product
        weights.append(size)
        product = original(weight, bias)

        def counted(x: torch.Tensor) -> torch.Tensor:
            products.append(size * x.shape[0])
            return product(x)

        return counted

    monkeypatch.setattr(compat, "packed_linear", packed_linear)
    lm_head = torch.randn(VOCAB, HIDDEN)
    target = SimpleNamespace(compute_logits=lambda rows: rows @ lm_head.T)
    five = random_heads(5, 2, num_lm_heads=num_lm_heads)
    three = random_heads(3, 2, num_lm_heads=0)
    three.layers, three.lm_heads = five.layers[:3], five.lm_heads[:3]
    costs, drafts = [], []
    for name, plain in (("five", five), ("three", three)):
        write(tmp_path / name / "model.safetensors", plain.spelled("vllm"))
        tree = TokenTree.dense([3, 2, 1])
        options = EngineOptions(str(tmp_path / name), None, tree, AcceptanceConfig())
        model = SimpleNamespace(
            get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB, dtype=torch.float32
        )
        config = SimpleNamespace(
            additional_config={"medusa": options.to_dict()},
            model_config=model,
            device_config=SimpleNamespace(device="cpu"),
        )
        drafter = MedusaDrafter(config)  # type: ignore[arg-type]
        drafter.load_model(target)  # type: ignore[arg-type]
        drafts.append(drafter.propose(torch.randn(4, HIDDEN, generator=torch.manual_seed(0))))
        costs.append((sum(weights), sum(products)))
        weights.clear()
        products.clear()
    own = 3 * 2 * HIDDEN * HIDDEN + (3 * VOCAB * HIDDEN if num_lm_heads else 0)
    assert costs == [(own, 4 * own)] * 2
    assert torch.equal(*drafts)
