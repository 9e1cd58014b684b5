"""EAGLE-3 drafters in every layout: the same tensors and layers, correctly identified."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import convert
from support.eagle import Eagle3

from vllm_medusa.convert.eagle import DRAFTER_FORMATS
from vllm_medusa.heads.eagle_checkpoint import inspect_eagle, named_layers
from vllm_medusa.heads.model import HeadsError

LAYERS = (2, 4, 5)  # vLLM's default of 8 layers


@pytest.fixture
def source(tmp_path: Path) -> str:
    torch.manual_seed(0)
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), LAYERS)
    return drafter.save(tmp_path / "source", base_model_name_or_path="owner/target")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("there", DRAFTER_FORMATS)
def test_a_round_trip_is_exact(source: str, there: str, tmp_path: Path) -> None:
    before = load_file(f"{source}/model.safetensors")
    convert(source, there, tmp_path / "there")
    found = inspect_eagle(tmp_path / "there")
    drafter = found.drafter
    assert found.fits and (drafter.method, drafter.draft_vocab_size) == ("eagle3", 200)
    assert drafter.layers == list(LAYERS)
    convert(tmp_path / "there", "native", tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in after
    )
    kept = ("hidden_size", "num_key_value_heads", "rope_parameters", "draft_vocab_size", "dtype")
    first, last = config_of(Path(source)), config_of(tmp_path / "back")
    assert {key: last[key] for key in kept} == {key: first[key] for key in kept}
    convert(tmp_path / "back", there, tmp_path / "there", overwrite=True)


def test_config_of_each_layout(source: str, tmp_path: Path) -> None:
    for name in DRAFTER_FORMATS:
        convert(source, name, tmp_path / name)
    assert (tmp_path / "safeailab" / "pytorch_model.bin").is_file()
    assert config_of(tmp_path / "safeailab")["architectures"] == ["LlamaForCausalLM"]
    theirs = config_of(tmp_path / "speculators")
    assert theirs["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert theirs["norm_before_residual"] is False  # not the default
    names = load_file(tmp_path / "speculators" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in names


def test_layers_are_numbered_as_each_reader_expects(source: str, tmp_path: Path) -> None:
    """Outputs in an eagle_config whose first is 1; the same default without numbers."""
    convert(source, "specforge", tmp_path / "unknown")
    own = "eagle_aux_hidden_state_layer_ids"
    assert config_of(tmp_path / "unknown")["eagle_config"][own] == [1, 3, 4]
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, target / "model.safetensors")
    convert(source, "specforge", tmp_path / "known", target=target)
    assert config_of(tmp_path / "known")["eagle_config"] == {"use_aux_hidden_state": True}
    for ids, layers in (([1, 3, 4], [2, 4, 5]), ([2, 4, 5], [2, 4, 5])):
        config = config_of(tmp_path / "known")
        config.pop(own, None)
        config["eagle_config"][own] = ids
        (tmp_path / "known" / "config.json").write_text(json.dumps(config))
        doubts = [check.name for check in inspect_eagle(tmp_path / "known").checks]
        assert ("numbers of layers" in doubts) == (ids[0] == 1)
        convert(tmp_path / "known", "native", tmp_path / "n", overwrite=(tmp_path / "n").exists())
        assert named_layers(config_of(tmp_path / "n")) == layers


def test_unsupported_features_of_a_layout_are_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="EAGLE drafters can be written as native, safeailab"):
        convert(source, "tgi", tmp_path / "new")
    config = config_of(Path(source)) | {"norm_before_residual": True}
    (Path(source) / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadsError, match="norm_before_residual, which SafeAILab's"):
        convert(source, "safeailab", tmp_path / "new")
    convert(source, "speculators", tmp_path / "kept")
    assert config_of(tmp_path / "kept")["norm_before_residual"] is True
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Eagle3.like_qwen3, "has 'layers.0.self_attn.k_norm.weight'"),
        (Eagle3.read_last, "reads only the last hidden state"),
        (lambda drafter: setattr(drafter, "window", 64), "sliding_attention, which SpecForge"),
    ],
)
def test_unsupported_layers_are_refused(change: Any, reason: str, tmp_path: Path) -> None:
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), LAYERS)
    change(drafter)
    source = drafter.save(tmp_path / "source")
    with pytest.raises(HeadsError, match=reason):
        convert(source, "specforge", tmp_path / "new")
    if drafter.window is not None:
        convert(source, "speculators", tmp_path / "kept")
        assert inspect_eagle(tmp_path / "kept").drafter.features == ["sliding window of 64"]


def test_a_map_of_the_full_vocabulary(tmp_path: Path) -> None:
    """SpecForge always stores one; vLLM does not support it."""
    source = Eagle3(torch.zeros(512, 64), torch.arange(512), LAYERS).save(tmp_path / "source")
    found = inspect_eagle(source)
    assert not found.fits and "convert --to native" in found.checks[0].text
    notes = convert(source, "native", tmp_path / "new").notes
    assert inspect_eagle(tmp_path / "new").fits and any("d2t" in note for note in notes)
    assert load_file(tmp_path / "new" / "model.safetensors").keys().isdisjoint({"d2t", "t2d"})
    file = tmp_path / "source" / "model.safetensors"
    save_file(load_file(file) | {"d2t": torch.ones(512, dtype=torch.int64)}, file)
    with pytest.raises(HeadsError, match="d2t permutes"):
        convert(source, "native", tmp_path / "other")
