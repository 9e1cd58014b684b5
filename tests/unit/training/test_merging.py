"""A merged folder: the adapted model's numbers, the target's files, whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.adapters import FAMILIES, disturb
from support.models import VOCAB, save_model
from transformers import AutoModelForCausalLM, GenerationConfig

from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.training import lora, merging
from vllm_medusa.training.options import LoraSettings

IDS = torch.arange(3, 35).view(2, 16) * 7 % VOCAB


def make(folder: Path, architecture: str, **changes: Any) -> tuple[str, Path, torch.Tensor]:
    """Save a bf16 target and a trained-looking adapter; gives the adapted model's logits."""
    source = save_model(folder / "target", architecture, **changes)
    AutoModelForCausalLM.from_pretrained(source).bfloat16().save_pretrained(source)
    GenerationConfig(eos_token_id=[1, 50], temperature=0.6, do_sample=True).save_pretrained(source)
    (folder / "target" / "tokenizer.json").write_text('{"left": "as it is"}')
    (folder / "target" / "README.md").write_text("about the original")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    adapted = lora.attach(model, LoraSettings(rank=4), seed=0)
    disturb(adapted, 0.1)
    with torch.no_grad():
        logits = model(IDS).logits
    return source, merging.save_adapter(adapted, folder / "adapter"), logits


@pytest.mark.parametrize("family", ["llama", "qwen, tied", "gemma, tied"])
def test_a_merged_folder_is_the_adapted_model(tmp_path, family):
    architecture, changes = FAMILIES[family]
    source, adapter, logits = make(tmp_path, architecture, **changes)
    merged = merging.merge_adapter(source, adapter, tmp_path / "merged")

    def tensors(folder):
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            names = list(file.keys())
            return {n: (file.get_tensor(n).dtype, file.get_tensor(n).shape) for n in names}

    assert tensors(merged) == tensors(source)  # bf16, nothing untied, nothing of peft's
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
    assert not (merged / "README.md").exists() and not (adapter / "README.md").exists()
    one, two = target_fingerprint(merged), target_fingerprint(source)
    assert one.pop("sha256") != two.pop("sha256") and one == two


def test_killed_while_writing_leaves_nothing_by_the_name(tmp_path, monkeypatch):
    source, adapter, _ = make(tmp_path, "Llama")
    output = tmp_path / "merged"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merging, "_copy_rest", killed)
        with pytest.raises(KeyboardInterrupt):
            merging.merge_adapter(source, adapter, output)
    assert not output.exists()
    first = merging.merge_adapter(source, adapter, output)
    weights = (first / "model.safetensors").read_bytes()
    (output / "left over").touch()
    merging.merge_adapter(source, adapter, output)
    assert (output / "model.safetensors").read_bytes() == weights
    assert not (output / "left over").exists() and not (tmp_path / "merged.part").exists()


def test_no_target_no_merging(tmp_path):
    _, adapter, _ = make(tmp_path, "Llama")
    with pytest.raises(lora.LoraError, match="can't be loaded to be merged"):
        merging.merge_adapter(tmp_path / "absent", adapter, tmp_path / "merged")
    with pytest.raises(lora.LoraError, match="carries an adapter already"):
        merging.merge_adapter(adapter, adapter, tmp_path / "merged")  # transformers loads its base
