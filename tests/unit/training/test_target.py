"""Hidden states and LM head output against the model's own logits."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.models import save_model
from transformers import AutoModel, AutoModelForCausalLM

from vllm_medusa.training.target import Target, TargetError

NARROW = {"initializer_range": 0.1}  # states near 1, so that caps do not saturate


def bias(model: Any) -> None:
    model.get_output_embeddings().bias.normal_(std=2.0)


GPT = {"head_dim": None, "num_key_value_heads": None}  # names in GPT-2's style
TARGETS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2, soft cap": ("Gemma2", {"tie_word_embeddings": True, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"config_name": "Gemma3TextConfig", "tie_word_embeddings": True}),
    "granite, scaled": ("Granite", {"logits_scaling": 8.0, "head_dim": None}),
    "cohere, scaled": (
        "Cohere",
        {"logit_scale": 0.25, "head_dim": None, "tie_word_embeddings": True},
    ),
    "phi, bias": ("Phi", {"head_dim": None, "tune": bias}),
    "gpt2, tied": ("GPT2", GPT | {"model_name": "GPT2LMHeadModel", "tie_word_embeddings": True}),
    "gpt-j, bias": ("GPTJ", GPT | {"rotary_dim": 8, "tune": bias}),
    "gpt-neox": ("GPTNeoX", GPT),
}


@pytest.mark.parametrize("name", TARGETS)
def test_states_and_lm_head_give_the_models_logits(name, tmp_path):
    architecture, options = TARGETS[name]
    target = Target.load(save_model(tmp_path, architecture, **NARROW | options))
    assert (target.hidden_size, target.vocab_size) == (64, 512)
    ids = torch.randint(3, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    wanted = target.model(ids, attention_mask=mask).logits
    states = target.hidden_states(ids, mask)
    assert states.shape == (3, 20, 64) and not states.requires_grad
    logits = target.lm_head(states)
    torch.testing.assert_close(logits[mask == 1], wanted[mask == 1], rtol=1e-5, atol=1e-5)
    tied = target.lm_head_weight is target.model.get_input_embeddings().weight
    assert tied == ("tied" in name or "gemma" in name or "cohere" in name)
    assert (target.lm_head_bias is not None) == ("bias" in name)
    assert (target.soft_cap is not None) == ("cap" in name)
    assert (target.logit_scale != 1) == ("scaled" in name)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training


def test_bfloat16(tmp_path):
    path = save_model(tmp_path, "Gemma2", final_logit_softcapping=5.0, **NARROW)
    target = Target.load(path, dtype=torch.bfloat16)
    ids = torch.arange(3, 20)[None]
    assert target.hidden_states(ids).dtype == torch.bfloat16
    torch.testing.assert_close(
        target.lm_head(target.hidden_states(ids).float()), target.model(ids).logits
    )


def test_refused_if_the_logits_differ(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, "Llama"))
    forward = model.forward

    def doubled(**options):
        out = forward(**options)
        out.logits = out.logits * 2
        return out

    model.forward = doubled
    with pytest.raises(TargetError, match="another operation in between"):
        Target(model)


def test_refused_without_an_lm_head_or_a_model(tmp_path):
    with pytest.raises(TargetError, match="no LM head"):
        Target(AutoModel.from_pretrained(save_model(tmp_path / "a", "Llama")))
    with pytest.raises(TargetError, match="can't be loaded as a causal LM"):
        Target.load(tmp_path)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantization_needs_bitsandbytes(quantization, tmp_path):
    with pytest.raises(TargetError, match="bitsandbytes"):
        Target.load(save_model(tmp_path, "Llama"), quantization=quantization)
