"""The adapter: its layers, that only it is trained, disabling it, merging it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.models import VOCAB, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.training import lora
from vllm_medusa.training.options import JointOptions
from vllm_medusa.training.target import TargetError

IDS = torch.arange(3, 35).view(2, 16) * 7 % VOCAB
FAMILIES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen": ("Qwen3", {}),
    "qwen, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma, tied": ("Gemma2", {"tie_word_embeddings": True}),  # with a soft cap
    "phi, lm_head with bias": ("Phi", {"head_dim": None, "num_key_value_heads": 4}),
}


def disturb(adapted: Any, scale: float = 0.02) -> None:
    """Make every matrix of the adapter nonzero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(adapted).values():
            parameter.add_(torch.randn_like(parameter) * scale)


@pytest.fixture(params=[name for name in FAMILIES if name != "qwen, tied"])
def model(request, tmp_path):
    architecture, changes = FAMILIES[request.param]
    folder = save_model(tmp_path, architecture, **changes)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def llama(chaotic_llama):
    return AutoModelForCausalLM.from_pretrained(chaotic_llama).eval()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_new_adapter_changes_no_bit_and_only_it_is_trained(model):
    own, before = weights(model), model(IDS).logits
    adapted = lora.attach(model, JointOptions(lora_rank=4), seed=0)
    trained = lora.adapter_parameters(adapted)
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained}
    assert not layers & {"lm_head", "embed_tokens"}, layers
    assert {"q_proj", "k_proj", "v_proj"} <= layers
    after = model(IDS).logits
    assert torch.equal(after, before)

    after.square().sum().backward()
    torch.optim.SGD(adapted.parameters(), lr=1e-3).step()
    assert all(p.grad is not None for p in trained.values())
    kept = {n.replace(".base_layer.", "."): t for n, t in model.state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in own.items())
    assert not torch.equal(model(IDS).logits, before)


def test_disabling_the_adapter_restores_the_original(model):
    with torch.no_grad():
        before = model(IDS).logits
    adapted = lora.attach(model, JointOptions(lora_rank=4), seed=0)
    disturb(adapted)
    changed = model(IDS).logits
    with lora.original(adapted):
        teacher = model(IDS).logits
    assert torch.equal(teacher, before) and not teacher.requires_grad
    assert torch.equal(model(IDS).logits, changed) and not torch.equal(changed, before)
    assert changed.requires_grad and lora.adapter_parameters(adapted)


def test_no_second_adapter(llama):
    lora.attach(llama, JointOptions(lora_rank=4), seed=0)
    with pytest.raises(TargetError, match="already has an adapter"):
        lora.attach(llama, JointOptions(), seed=0)


def test_the_same_seed_gives_the_same_adapter_and_keeps_the_random_state(llama):
    torch.manual_seed(5)
    expected = torch.rand(1)
    first = copy.deepcopy(llama)
    torch.manual_seed(5)
    one = lora.adapter_parameters(lora.attach(first, JointOptions(lora_rank=4), seed=7))
    assert torch.equal(torch.rand(1), expected)
    two = lora.adapter_parameters(lora.attach(llama, JointOptions(lora_rank=4), seed=7))
    assert all(torch.equal(one[name], two[name]) for name in one)


def make(folder: Path, architecture: str, **changes: Any) -> tuple[str, Path, torch.Tensor]:
    """Save a bf16 target and an adapter like a trained one; returns the adapted model's logits."""
    source = save_model(folder / "target", architecture, **changes)
    AutoModelForCausalLM.from_pretrained(source).bfloat16().save_pretrained(source)
    GenerationConfig(eos_token_id=[1, 50], temperature=0.6, do_sample=True).save_pretrained(source)
    (folder / "target" / "tokenizer.json").write_text('{"left": "as it is"}')
    (folder / "target" / "README.md").write_text("about the original")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    adapted = lora.attach(model, JointOptions(lora_rank=4), seed=0)
    disturb(adapted, 0.1)
    with torch.no_grad():
        logits = model(IDS).logits
    adapted.save_pretrained(folder / "adapter")
    return source, folder / "adapter", logits


@pytest.mark.parametrize("family", ["llama", "qwen, tied", "gemma, tied"])
def test_a_merged_folder_is_the_adapted_model(tmp_path, family):
    architecture, changes = FAMILIES[family]
    source, adapter, logits = make(tmp_path, architecture, **changes)
    merged = lora.merge_adapter(source, adapter, tmp_path / "merged")

    def tensors(folder):
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            names = list(file.keys())
            return {n: (file.get_tensor(n).dtype, file.get_tensor(n).shape) for n in names}

    assert tensors(merged) == tensors(source)  # bf16, still tied, without peft's tensors
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        got = model(IDS).logits
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(IDS).logits
    scale = float(logits.abs().max())
    rounding = float((got - logits).abs().max()) / scale
    moved = float((original - logits).abs().max()) / scale
    assert rounding < 0.1 * moved, (rounding, moved)

    config = json.loads((merged / "config.json").read_text())
    before = json.loads((Path(source) / "config.json").read_text())
    assert config == before
    for name in ("tokenizer.json", "generation_config.json"):
        assert (merged / name).read_bytes() == (Path(source) / name).read_bytes()
    assert not (merged / "README.md").exists()
    one, two = target_fingerprint(merged), target_fingerprint(source)
    assert one.pop("sha256") != two.pop("sha256") and one == two


def test_non_finite_weights_are_not_merged(tmp_path, chaotic_llama, llama):
    adapted = lora.attach(llama, JointOptions(lora_rank=4), seed=0)
    disturb(adapted, float("nan"))
    adapted.save_pretrained(adapter := tmp_path / "adapter")
    with pytest.raises(ValueError, match="NaNs detected"):
        lora.merge_adapter(chaotic_llama, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
