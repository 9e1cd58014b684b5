"""The benchmark's enlarged models compute what the small ones compute."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.enlarge_heads import enlarge_drafter, enlarge_heads, widen_heads
from benchmarks.enlarge_target import EnlargeError, Enlarger, Shape, enlarge_target
from vllm_medusa.heads import MedusaHeads, load_heads, save_heads
from vllm_medusa.heads.checkpoint import save_drafter
from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape
from vllm_medusa.heads.hydra import HydraHeads

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
    "rms_norm_eps": 1e-2,  # large: a wrong eps must show
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
    with torch.no_grad():  # norm gains and scales that matter
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 1))
    model.eval().save_pretrained(tmp_path / "small")
    return tmp_path / "small", model


def reload(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


SHAPES = [
    Shape(64, 80, 5, 8, 4),  # same groups
    Shape(96, 48, 2, 12, 4),  # wider groups: query heads move
    Shape(48, 49, 3, 4, 2),  # a ratio that is no power of two
    Shape(32, 48, 2, 4, 2),  # nothing to do
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_logits_stay(small, tmp_path, shape):
    folder, model = small
    count = enlarge_target(folder, tmp_path / "big", shape)
    big = reload(tmp_path / "big")
    assert count == sum(p.numel() for p in big.parameters())
    assert Shape.of(big.config.to_dict()) == shape
    ids = torch.randint(SMALL["vocab_size"], (3, 24))
    torch.testing.assert_close(big(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_bf16_differs_by_rounding_only(small, tmp_path):
    """On average by less than bf16 itself loses; sums are merely split differently."""
    folder, model = small
    enlarge_target(folder, tmp_path / "big", Shape(128, 64, 3, 8, 4))
    ids = torch.randint(SMALL["vocab_size"], (2, 9))
    exact = model(ids).logits
    want = model.to(torch.bfloat16)(ids).logits
    got = LlamaForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.bfloat16)(ids).logits
    assert (got - want).abs().mean() <= (want - exact).abs().mean()


@torch.no_grad()
def test_new_weights_cost_but_do_not_count(small, tmp_path):
    """What is new is random, except the projections into the residual stream."""
    folder, _ = small
    enlarge_target(folder, tmp_path / "big", Shape(64, 80, 3, 8, 4))
    layers = reload(tmp_path / "big").model.layers
    assert not layers[2].self_attn.o_proj.weight.any()
    assert not layers[2].mlp.down_proj.weight.any()
    assert not layers[0].self_attn.o_proj.weight[32:].any()
    assert layers[2].mlp.up_proj.weight.all()
    assert layers[0].self_attn.q_proj.weight.all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(16, 80, 5, 8, 4), "hidden_size 16 is below the model's 32"),
        (Shape(64, 80, 5, 8, 8), "can't hold groups of 2"),
        (Shape(64, 80, 5, 9, 4), "multiple of num_kv_heads"),
        (None, "can't enlarge GemmaForCausalLM"),
    ],
)
def test_refuses_what_does_not_fit(shape, message):
    architecture = "LlamaForCausalLM" if shape else "GemmaForCausalLM"
    with pytest.raises(EnlargeError, match=message):
        Enlarger(SMALL | {"architectures": [architecture]}, shape)


def random_heads(**options):
    heads = MedusaHeads(3, 2, SMALL["hidden_size"], SMALL["vocab_size"], **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return heads


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"lm_head_bias": True}, {"num_lm_heads": 1}, {"shared_lm_head": True}],
    ids=str,
)
@torch.no_grad()
def test_head_logits_stay(options):
    heads = random_heads(**options)
    wide = widen_heads(heads, 80)
    hidden = torch.randn(4, 32)
    lm_head = torch.randn(SMALL["vocab_size"], 32)
    padded = torch.nn.functional.pad(hidden, (0, 48))
    want = heads.compute_logits(heads(hidden), lambda x: x @ lm_head.T)
    got = wide.compute_logits(wide(padded), lambda x: x[:, :32] @ lm_head.T)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert not wide(padded)[..., 32:].any()


@torch.no_grad()
def test_heads_folder_serves_us_and_stock_vllm(small, tmp_path):
    """Shared heads get a copy of the enlarged target's LM head, and keep their tree."""
    folder, _ = small
    heads = random_heads(shared_lm_head=True)
    save_heads(tmp_path / "heads", heads, {"tree": [[0], [0, 0]]})
    enlarge_heads(tmp_path / "heads", folder, tmp_path / "big-heads", 128)
    enlarge_target(folder, tmp_path / "big", Shape(128, 48, 2, 4, 2))
    lm_head = reload(tmp_path / "big").lm_head.weight
    wide, info = load_heads(tmp_path / "big-heads", hidden_size=128, vocab_size=97)
    assert info.tree == [[0], [0, 0]]
    assert wide.lm_head_weight is not None
    torch.testing.assert_close(wide.lm_head_weight[0], lm_head)
    config = json.loads((tmp_path / "big-heads" / "config.json").read_text())
    assert config["original_lm_head"] is True
    assert config["medusa_fc_bias"] is True


def randomly(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


@pytest.mark.parametrize("num_lm_heads", [0, 3])
@torch.no_grad()
def test_hydra_logits_stay(num_lm_heads):
    heads = randomly(HydraHeads(3, 2, 32, 97, num_lm_heads=num_lm_heads, lm_head_bias=False))
    wide = widen_heads(heads, 80)
    hidden, path = torch.randn(4, 32), torch.randint(97, (4, 3))
    heads.use_target_embedding(torch.randn(97, 32))
    wide.use_target_embedding(torch.nn.functional.pad(heads.embedding, (0, 48)))
    lm_head = torch.randn(97, 32)
    big = wide(torch.nn.functional.pad(hidden, (0, 48)), path=path)
    want = heads.compute_logits(heads(hidden, path=path), lambda x: x @ lm_head.T)
    got = wide.compute_logits(big, lambda x: x[..., :32] @ lm_head.T)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert not big[..., 32:].any()
    assert wide.inputs[1].weight[:32].all()


@torch.no_grad()
def test_eagle_states_stay(tmp_path):
    """All steps of its chains, of which each reads the states of the one before."""
    config = LlamaConfig(**SMALL)
    drafter = randomly(EagleDrafter(EagleShape.of(config, (0, 1, 2), 32, 97), 3))
    save_drafter(tmp_path / "drafter", drafter)
    shape = Shape(80, 90, 5, 8, 4)
    enlarge_drafter(tmp_path / "drafter", tmp_path / "big", shape)
    sizes = json.loads((tmp_path / "big" / "config.json").read_text())
    assert sizes["num_hidden_layers"] == 1
    wide = EagleDrafter(EagleShape.of(LlamaConfig.from_dict(sizes), (0, 1, 2), 80, 97), 3)
    stored = load_file(tmp_path / "big" / "model.safetensors")
    wide.load_state_dict(stored)
    features, path = torch.randn(2, 7, 3, 32), torch.randint(97, (2, 7, 3))
    drafter.embedding = torch.randn(97, 32)
    wide.embedding = torch.nn.functional.pad(drafter.embedding, (0, 48))
    want = drafter.compute_logits(drafter(features.flatten(2), path))
    got = wide.compute_logits(wide(torch.nn.functional.pad(features, (0, 48)).flatten(2), path))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert stored["midlayer.self_attn.q_proj.weight"][:16].all()
