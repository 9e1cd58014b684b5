"""The same weights have the same fingerprint in any storage; other weights have another."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.assets import TARGET
from support.random_heads import random_heads, write, write_sharded

from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.fingerprint import match_target, target_fingerprint
from vllm_medusa.heads.model import HeadsError

LAYERS, HIDDEN, VOCAB = 3, 96, 400
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS, "transformers_version": "4.1", "torch_dtype": "bfloat16",
}  # fmt: skip


def weights(prefix="model."):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {f"{prefix}embed_tokens.weight": normal(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        stem = f"{prefix}layers.{layer}"
        tensors[f"{stem}.self_attn.q_proj.weight"] = normal(HIDDEN, HIDDEN)
        tensors[f"{stem}.mlp.up_proj.weight"] = normal(200, HIDDEN)
        tensors[f"{stem}.input_layernorm.weight"] = normal(HIDDEN)
    tensors[f"{prefix}norm.weight"] = normal(HIDDEN)
    tensors["lm_head.weight"] = normal(VOCAB, HIDDEN)
    return tensors


def digest(folder, **options):
    return target_fingerprint(folder, **options)["sha256"]


def saved(folder, tensors, file="model.safetensors", config=CONFIG):
    write(folder / file, tensors, config)
    return folder


def sharded(folder, tensors, stem, suffix):
    names = list(tensors)
    parts = {
        f"{stem}-{i:05d}-of-00003.{suffix}": {name: tensors[name] for name in names[i::3]}
        for i in range(3)
    }
    return write_sharded(folder, parts, f"{stem}.{suffix}.index.json", CONFIG)


@pytest.fixture
def plain(tmp_path):
    return digest(saved(tmp_path / "plain", weights()))


def test_files_and_formats_do_not_matter(plain, tmp_path):
    assert digest(sharded(tmp_path / "a", weights(), "model", "safetensors")) == plain
    assert digest(saved(tmp_path / "b", weights(), "pytorch_model.bin")) == plain
    assert digest(sharded(tmp_path / "c", weights(), "pytorch_model", "bin")) == plain
    assert digest(str(tmp_path / "b")) == plain


def test_irrelevant_differences_do_not_matter(plain, tmp_path):
    config = {key: CONFIG[key] for key in ("hidden_size", "vocab_size")}
    assert digest(saved(tmp_path / "a", weights(), config=config | {"dtype": "bfloat16"})) == plain
    (tmp_path / "a" / "config.json").unlink()
    assert digest(tmp_path / "a") == plain
    exact = {name: tensor.float() for name, tensor in weights().items()}
    assert digest(saved(tmp_path / "b", exact)) == plain
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.attn.bias": torch.ones(1, 1, 8, 8),
        "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
    }
    assert digest(saved(tmp_path / "c", weights() | buffers)) == plain
    heads = random_heads().spelled("v1", "medusa_head.")
    assert digest(saved(tmp_path / "d", weights() | heads)) == plain
    write(tmp_path / "d" / "medusa_lm_head.safetensors", random_heads().spelled("v1"))
    assert digest(tmp_path / "d") == plain
    renamed = weights("model.language_model.")
    assert digest(saved(tmp_path / "e", renamed)) == plain


def test_tied_embeddings_may_be_stored_once_or_twice(tmp_path):
    tied = weights()
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    both = digest(saved(tmp_path / "a", tied, "pytorch_model.bin"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        one = {key: tensor for key, tensor in tied.items() if key != name}
        assert digest(saved(tmp_path / name, one)) == both


@pytest.mark.parametrize("name", weights())
def test_any_trained_tensor_changes_it(name, plain, tmp_path):
    """A training step changes nearly all values of a tensor, at least by rounding."""
    tuned = weights()
    tuned[name] = (tuned[name].float() * 1.01).to(torch.bfloat16)
    assert digest(saved(tmp_path / "a", tuned)) != plain


def test_the_order_of_layers_changes_it(plain, tmp_path):
    swapped = {
        name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."): tensor
        for name, tensor in weights().items()
    }
    assert digest(saved(tmp_path / "a", swapped)) != plain


def test_a_target_saved_again_is_the_same(tmp_path):
    tensors = load_file(f"{TARGET}/model.safetensors")
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    config = json.loads(Path(TARGET, "config.json").read_text())
    write(tmp_path / "pytorch_model.bin", twice, config)
    assert target_fingerprint(tmp_path) == target_fingerprint(TARGET)
    assert target_fingerprint(TARGET) == {
        "sha256": "2fbae0fcfc51a0968b6fbc57bd22c27c9dc3f9e524c1f53a91375df0719c1ac1",
        "scheme": 1,  # a new digest for the same weights needs a new scheme
        "architecture": "LlamaForCausalLM",
        "hidden_size": 256,
        "vocab_size": 4096,
        "num_layers": 4,
        "quantization": None,
    }


def test_a_hub_name_is_looked_up_in_the_cache_only(plain, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(HeadsError, match="download it first"):
        digest("some/model")
    repository = tmp_path / "hub" / "models--some--model"
    saved(repository / "snapshots" / "abc", weights())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert digest("some/model") == plain


@pytest.mark.parametrize("what", ["nothing", "no weights", "no folder", "a shard is missing"])
def test_a_folder_without_weights_is_refused(what, tmp_path):
    folder = tmp_path / "target"
    if what == "a shard is missing":
        sharded(folder, weights(), "model", "safetensors")
        next(folder.glob("model-00001*")).unlink()
    elif what == "no weights":
        saved(folder, random_heads().spelled("v1", "medusa_head."))
    elif what == "nothing":
        folder.mkdir()
    with pytest.raises(HeadsError):
        digest(folder)


@pytest.fixture
def heads(tmp_path):
    """Heads for the plain target; ``changes`` apply to their stored fingerprint."""

    def make(target=None, **changes):
        folder = tmp_path / "heads"
        stored = None if target is None else target_fingerprint(target) | changes
        write(folder / "model.safetensors", random_heads().spelled("vllm"))
        document = {} if stored is None else {"medusa": {"target": stored}}
        (folder / "config.json").write_text(json.dumps(document))
        return peek_heads(folder).files

    return make


def test_match(heads, tmp_path):
    target = saved(tmp_path / "target", weights())
    same = match_target(heads(target), target)
    assert (same.verdict, same.warning) == ("same", None)
    silent = match_target(heads(), target)
    assert (silent.verdict, silent.warning) == ("unknown", None)
    tuned = weights() | {"model.norm.weight": torch.zeros(HIDDEN)}
    other = match_target(heads(target), saved(tmp_path / "tuned", tuned))
    assert other.verdict == "different"
    assert f"The drafter in {tmp_path / 'heads'} was made for another target" in other.warning
    assert "fine-tune" in other.warning
    smaller = match_target(heads(target, num_layers=5, sha256="0"), target)
    assert "num_layers is 3, not 5" in smaller.warning


def test_failed_comparisons_are_reported(heads, tmp_path):
    target = saved(tmp_path / "target", weights())
    for drafter, place, words, options in (
        (heads(target, scheme=99), target, "another version", {}),
        (heads(target), tmp_path / "absent", "no such folder", {}),
        (heads(target), target, "took longer than 0 s", {"seconds": 0}),
    ):
        match = match_target(drafter, place, **options)
        assert match.verdict == "unknown"
        assert words in match.warning
    packed = weights() | {"model.layers.0.mlp.up_proj.qweight": torch.ones(8, 8).int()}
    config = CONFIG | {"quantization_config": {"quant_method": "gptq"}}
    quantized = saved(tmp_path / "quantized", packed, config=config)
    match = match_target(heads(target), quantized)
    assert match.verdict == "unknown"
    assert "quantized by gptq" in match.warning
    assert match_target(heads(quantized), quantized).verdict == "same"
