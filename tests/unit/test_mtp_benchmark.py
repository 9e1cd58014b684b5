"""`python -m benchmarks mtp`: its module and losses equal those of the tests' dense module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.eagle import overfitting
from support.models import VOCAB, save_model
from support.mtp import SHAPE, Mtp
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.mtp import arms, train
from vllm_medusa.offline.records import load_records

PROMPT = 6
HEADS: dict[str, Any] = {"num_heads": 2, "lm_heads": "shared", "draft_vocab": 0}


def heldout(options: Any) -> Any:
    """The same options, with a quarter of the texts held out."""
    return replace(options, files=replace(options.files, heldout_share=0.25))


def test_losses_are_those_of_a_dense_module(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", "Llama", **SHAPE)
    texts = torch.randint(3, VOCAB, (8, 24), generator=torch.Generator().manual_seed(0))
    options = overfitting(target, texts, PROMPT, tmp_path / "mimo", epochs=3, **HEADS)
    about = train(heldout(options))
    assert train(heldout(options)) == about  # it is not trained again
    tensors = load_file(tmp_path / "mimo" / "model.safetensors")
    assert not tensors["model.layers.1.self_attn.q_proj.bias"].any()
    assert tensors["model.mtp_layers.0.self_attn.q_proj.bias"].any()

    records, _ = load_records(tmp_path / "mimo/training/heldout.jsonl", vocab_size=VOCAB)
    ids = torch.tensor([record.token_ids for record in records])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    drafter = Mtp.load(tmp_path / "mimo", model)
    features, length = drafter.features(model, ids)[:, :-1], ids.shape[1] - 1
    ones = torch.ones(length, length, dtype=torch.bool)
    seen = torch.cat([ones.tril(-1), torch.eye(length, dtype=torch.bool)], 1)  # level 2
    with torch.no_grad():
        first, _, cache = drafter.step(ids[:, 1:], features)
        second, _, _ = drafter.step(ids[:, 1:], first.roll(1, 1), (cache,), seen)
        found = [
            cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten())
            for logits, start in [
                (model(ids).logits[:, PROMPT:-1], PROMPT + 1),
                (drafter.lm_head(first)[:, PROMPT - 1 : -1], PROMPT + 1),
                (drafter.lm_head(second)[:, PROMPT:-1], PROMPT + 2),
            ]
        ]
    expected = [about["target_loss"], *about["heldout"]["loss"]]
    assert torch.stack(found).tolist() == pytest.approx(expected, abs=1e-3)


def test_other_shapes_of_heads_are_refused(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", "Llama")  # 4 heads of 32 channels, 64 in all
    texts = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="64 channels in all"):
        train(overfitting(target, texts, PROMPT, tmp_path / "mimo", epochs=1, **HEADS))


def test_arms_of_one_form_share_an_engine() -> None:
    about = {"heldout": {"loss": [2.0], "top": [[0.5, 0.6]]}, "tokens": 9, "target_loss": 1.0}
    options: Any = SimpleNamespace(nodes=(2, 7))
    found = list(arms(options, about))
    assert [arm.name for arm in found] == [
        f"{form} {size}" for form in ("stock", "chain", "dynamic") for size in (2, 7)
    ]
    assert len({arm.engine for arm in found}) == 4 and [arm.stock for arm in found[1:3]] == [1, 0]
    assert found[-2].request == {"medusa": {"max_draft_tokens": 2}}
    assert found[-1].config == found[-2].config and found[-1].against == "chain 7"
