"""Layouts of EAGLE drafters: recognized, and refused by the name of a tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import convert, run, said
from support.eagle import Eagle1, Eagle3

from vllm_medusa.heads.eagle_checkpoint import EagleInspection, inspect_eagle
from vllm_medusa.heads.eagle_model import EagleShape
from vllm_medusa.heads.eagle_tensors import Layout
from vllm_medusa.heads.files import find_checkpoint

Change = Callable[[Eagle3], Any]
LAYERS = (1, 2, 3)
VARIANTS: dict[str, tuple[Change, str, list[str]]] = {
    "plain": (lambda drafter: None, "EAGLE-3", []),
    "3.1": (Eagle3.add_norms, "EAGLE-3.1", ["3 norms before fc", "the next step reads normed"]),
    "last": (Eagle3.read_last, "EAGLE-3", ["reads only the target's last hidden state"]),
    "qwen3": (Eagle3.like_qwen3, "EAGLE-3", ["Qwen3's layer"]),
    "window": (lambda each: setattr(each, "window", 64), "EAGLE-3", ["sliding window of 64"]),
    "parallel": (Eagle3.draft_in_parallel, "P-EAGLE", ["parallel levels"]),
}


def saved(folder: Path, variant: str, **config: Any) -> Path:
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), LAYERS)
    VARIANTS[variant][0](drafter)
    return Path(drafter.save(folder, **config))


def rewritten(folder: Path, config: dict[str, Any], **tensors: Any) -> EagleInspection:
    """Inspect a folder with other keys and tensors; None removes one."""
    for file, change, load, save in (
        ("config.json", config, lambda path: json.loads(path.read_text()), save_config),
        ("model.safetensors", tensors, load_file, save_file),
    ):
        path = folder / file
        save({k: v for k, v in (load(path) | change).items() if v is not None}, path)
    return inspect_eagle(folder)


def save_config(config: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(config))


def problems(found: EagleInspection) -> list[str]:
    return [check.text for check in found.checks if check.verdict == "does not fit"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_absent_tensor_is_named(variant: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, variant)
    found, (_, kind, features) = inspect_eagle(folder), VARIANTS[variant]
    assert found.fits and found.drafter.method == "eagle3"
    assert found.drafter.kind == kind
    assert found.drafter.layout == ("SpecForge" if variant == "last" else "SafeAILab")
    assert len(found.drafter.features) == len(features)
    for text, start in zip(found.drafter.features, features, strict=True):
        assert text.startswith(start)
    tensors = load_file(folder / "model.safetensors")
    expected = Layout.read(find_checkpoint(folder)).tensors()
    needed = {name for name, each in expected.items() if each.required}
    assert needed == {name.replace("midlayer.", "layers.0.") for name in tensors} - {"t2d"}
    for name in tensors.keys() - {"t2d", "fc.weight", "midlayer.hidden_norm.weight"}:
        less = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(less, folder / "model.safetensors")
        named = name.replace("midlayer.", "layers.0.")
        texts = problems(inspect_eagle(folder))
        assert len(texts) == 1 and f'it has no "{named}" [' in texts[0]
        save_file(less | {name: torch.zeros(7)}, folder / "model.safetensors")
        assert f'"{named}" has the shape [7]; its config' in problems(inspect_eagle(folder))[0]


def test_eagle_1_has_no_first_norm(tmp_path: Path) -> None:
    """vLLM's EAGLE-1 has none, though variants of it do."""
    weights = SimpleNamespace(weight=torch.nn.Parameter(torch.zeros(512, 64)))
    model = SimpleNamespace(get_input_embeddings=lambda: weights, lm_head=weights)
    folder = Path(Eagle1(model).save(tmp_path))
    found = inspect_eagle(folder)
    assert found.fits and found.drafter.kind == "EAGLE-1 or 2"
    assert found.drafter.layout == "SafeAILab"
    norm = {"layers.0.input_layernorm.weight": torch.ones(64)}
    (text,) = problems(rewritten(folder, {}, **norm))
    assert 'it has "layers.0.input_layernorm.weight", which vLLM does not read' in text


@pytest.mark.parametrize("variant", ["plain", "3.1"])
@pytest.mark.parametrize("layout", ["speculators", "specforge", "native", "safeailab"])
def test_folders_of_each_project(variant: str, layout: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", variant)
    if (variant, layout) == ("3.1", "safeailab"):
        return
    convert(str(source), layout, tmp_path / "made")
    found, name = inspect_eagle(tmp_path / "made"), layout.replace("specforge", "SpecForge")
    assert found.fits and found.drafter.layout == name.replace("safeailab", "SafeAILab")
    assert found.drafter.kind == VARIANTS[variant][1]
    doubts = [check.name for check in found.checks if check.verdict == "unknown"]
    assert ("norm_output" in doubts) == ((variant, layout) == ("3.1", "specforge"))


def test_p_eagle(tmp_path: Path) -> None:
    """Recognized in the folders of each project; its mask token must be known."""
    folder = saved(tmp_path, "parallel")
    for config in (
        {"architectures": ["PEagleDraftModel"]},
        {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"},
        {"architectures": ["PeagleLlamaForCausalLM"], "speculators_model_type": None},
    ):
        found = rewritten(folder, config)
        assert found.fits and found.drafter.kind == "P-EAGLE"
    ids: dict[str, Any] = {"mask_token_id": None, "ptd_token_id": 7}
    assert rewritten(folder, ids).drafter.mask_token == 7
    (text,) = problems(rewritten(saved(tmp_path / "plain", "plain"), {"mask_token_id": 3}))
    assert 'it has no "mask_hidden" [192]' in text
    assert "remove the mask token (mask_token_id" in text
    for token in (None, 512, "x"):
        (text,) = problems(rewritten(folder, {"ptd_token_id": token}))
        assert f"(mask_token_id, pard_token, ptd_token_id) is {token}. Set" in text
    texts = problems(rewritten(folder, {"eagle_config": {"use_aux_hidden_state": False}}))
    assert any("from the target's last hidden state alone" in text for text in texts)


def test_more_layers_and_biases(tmp_path: Path) -> None:
    """Deeper layers read only states; Llama's layer has a bias at each of its projections."""
    found = rewritten(saved(tmp_path, "plain"), {"num_hidden_layers": 2, "attention_bias": True})
    absent = [text.split('"')[1] for text in problems(found)]
    assert len(absent) == 4 + 9 + 4 and "layers.1.hidden_norm.weight" not in absent
    assert {"layers.1.input_layernorm.weight", "layers.0.self_attn.o_proj.bias"} <= {*absent}
    layout = Layout.read(find_checkpoint(tmp_path))
    assert layout.tensors()["layers.1.self_attn.q_proj.weight"].shape == (128, 64)
    types = ["full_attention", "sliding_attention"]
    found = rewritten(tmp_path, {"layer_types": types, "sliding_window": 64})
    assert any("its layers have different windows" in text for text in problems(found))


def test_quantized_tensors_are_not_checked(tmp_path: Path) -> None:
    scale = {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}
    config = {"quantization_config": {"quant_method": "fp8"}}
    found = rewritten(saved(tmp_path, "plain"), config, **scale)
    assert problems(found) == []
    texts = ["quantized (fp8): they were not checked", "200 of 512 tokens"]
    assert [check.text for check in found.checks] == texts


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("num_hidden_layers", "1", "a positive integer"),
        ("num_hidden_layers", None, "a positive integer"),
        ("sliding_window", "10", "a positive integer"),
        ("hidden_size", "576", "a positive integer"),
        ("layer_types", 3, "a list"),
        ("architectures", "LlamaForCausalLM", "a list of names"),
        ("architectures", [3], "a list of names"),
        ("rope_parameters", "yarn", "an object"),
        ("rope_scaling", 2.0, "an object"),
        ("eagle_aux_hidden_state_layer_ids", 5, "a list"),
    ],
)
def test_values_of_other_types_are_named(tmp_path, capsys, key, value, wanted):
    Eagle3(torch.zeros(90, 48), torch.arange(60), (1, 2, 3)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    assert run("inspect", tmp_path) == 2
    assert f"{key} = {value!r}; it must be {wanted}" in said(capsys)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "its rope_type is 'spiral'; trees support"),
        ({"rope_scaling": {"type": "spiral"}}, "its rope_type is 'spiral'; trees support"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "nested by layer type (full_attention)",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"hidden_act": "gelu"}, "hidden_act) is 'gelu'"),
        ({"hidden_act": "silu"}, None),
    ],
)
def test_ropes_and_activations(config: dict[str, Any], reason: str | None, tmp_path: Path) -> None:
    found = problems(rewritten(saved(tmp_path, "plain"), config))
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


def test_an_old_rope_theta_beside_new_parameters() -> None:
    config = SimpleNamespace(rope_theta=500.0, rope_parameters={"rope_type": "default"})
    assert EagleShape.of(config, LAYERS, 64, 512).rope_theta == 500.0


def test_a_layer_of_qwen3_by_its_model_type(tmp_path: Path) -> None:
    """Speculators' config names it nowhere else."""
    folder = saved(tmp_path, "plain")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3"}
    config |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    save_config(config | {"transformer_layer_config": config}, folder / "config.json")
    texts = problems(inspect_eagle(folder))
    assert [text.split('"')[1].split(".")[-2] for text in texts] == ["q_norm", "k_norm"]
    assert all("if its layers are Llama's" in text for text in texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_damaged_values_are_found(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(tmp_path, "plain")
    assert inspect_eagle(folder).damage == []
    weight = load_file(folder / "model.safetensors")["midlayer.mlp.up_proj.weight"]
    weight[3, 5] = torch.nan
    found = rewritten(folder, {}, **{"midlayer.mlp.up_proj.weight": weight.to(dtype)})
    assert not found.fits
    (text,) = found.damage
    assert text.startswith("'midlayer.mlp.up_proj.weight' holds NaN or infinity")
