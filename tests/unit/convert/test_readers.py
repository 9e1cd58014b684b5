"""Our output, read by others: vLLM's own class, the reference's module, TGI and TRT-LLM."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.commands import convert
from support.one_rank import one_rank
from support.random_heads import HIDDEN, VOCAB, random_heads
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


def reference(num_heads, num_layers):
    """The heads as in the paper's code: a list of sequences, blocks and an LM head."""
    return nn.ModuleList(
        nn.Sequential(*(Block() for _ in range(num_layers)), nn.Linear(HIDDEN, VOCAB, bias=False))
        for _ in range(num_heads)
    )


@pytest.mark.parametrize("foreign", ["v1", "tensorrt-llm"])
@pytest.mark.parametrize("num_lm_heads", [3, 1, 0])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_references_module_loads_v1_strictly(
    foreign, num_lm_heads, num_layers, native, target, hidden, tmp_path
):
    options = {"num_lm_heads": num_lm_heads, "num_layers": num_layers}
    folder, lm_head = target
    convert(native(**options), foreign, tmp_path / "v1", target=folder)
    module = reference(3, num_layers)
    state = torch.load(tmp_path / "v1" / "medusa_lm_head.pt", weights_only=True)
    module.load_state_dict(state, strict=True)
    logits = torch.stack([head(hidden) for head in module], 1)
    torch.testing.assert_close(logits, random_heads(**options).logits(hidden, lm_head))
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, num_layers)
    assert config["base_model_name_or_path"] == "some/model"
    if foreign == "tensorrt-llm":
        assert config["num_medusa_heads"] == 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_lm_heads", [3, 0])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_tgi_finds_every_name(num_lm_heads, num_layers, bias, native, target, tmp_path):
    source = native(num_lm_heads=num_lm_heads, num_layers=num_layers, bias=bias)
    convert(source, "tgi", tmp_path / "tgi", target=target[0])
    config = json.loads((tmp_path / "tgi" / "config.json").read_text())
    assert "architectures" not in config  # otherwise it is read as another speculator
    assert config["medusa_num_layers"] == num_layers
    shared = num_lm_heads == 0 and num_layers == 1  # TGI shares the target's only with one layer
    requested = {
        f"{head}.{layer}.linear.{kind}"
        for head in range(config["medusa_num_heads"])
        for layer in range(num_layers)
        for kind in ("weight", "bias")
    }
    if not shared:
        requested |= {f"{head}.{num_layers}.weight" for head in range(3)}
    with safe_open(tmp_path / "tgi" / "medusa_lm_head.safetensors", framework="pt") as file:
        assert set(file.keys()) == requested


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("ranks") / "store"):
        yield


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bias": False},
        {"num_lm_heads": 1},
        {"num_lm_heads": 0},
        {"num_heads": 1},
        {"rows": VOCAB + 4},
        {"num_lm_heads": 0, "token_map": torch.tensor([5, 0, 19, 7])},
        {"num_lm_heads": 1, "rows": 4, "token_map": torch.tensor([5, 0, 19, 7])},
        {"num_heads": 1, "rows": 4, "token_map": torch.tensor([5, 0, 19, 7])},
        {"foreign": True},
    ],
    ids=str,
)
def test_stock_vllm_loads_everything_and_gives_the_same_result(
    options, alone, native, target, hidden, tmp_path
):
    """vLLM's own config and model classes, without this package's plugin."""
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig

    config = {"my_num_of_heads": 99} if options.pop("foreign", False) else {}
    plain = random_heads(**options)
    folder, lm_head = target
    if options.get("num_heads") == 1:
        config["original_lm_head"] = False
    convert(native(config=config, **options), "vllm", tmp_path / "out", target=folder)
    hf_config = MedusaConfig.from_pretrained(tmp_path / "out")
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config))
    model = Medusa(vllm_config=SimpleNamespace(speculative_config=draft))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # to detect parameters that are not loaded
        stored = load_file(tmp_path / "out" / "model.safetensors")
        loaded = model.load_weights(stored.items())
        assert len(loaded) == len(stored) - ("token_map" in stored)
        for module in model.modules():  # as vLLM's loaders do after loading all weights
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        logits = torch.stack(model.compute_logits(model(hidden)), 1)
    expected = plain.logits(hidden, lm_head)[..., :VOCAB]
    if plain.token_map is not None:
        whole = torch.full((*expected.shape[:-1], VOCAB), -torch.inf)
        whole[..., plain.token_map] = expected
        expected = whole
    torch.testing.assert_close(logits, expected)
