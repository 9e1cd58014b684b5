import json

import pytest
import torch
from safetensors.torch import load_file
from support.random_heads import HIDDEN, VOCAB, random_heads, write

LAYERS_OF_TARGET = 2


@pytest.fixture
def target(tmp_path_factory):
    """A target's folder, whose LM head has 4 padding rows; returns (folder, LM head [V, H])."""
    folder = tmp_path_factory.mktemp("target")
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "lm_head.weight": normal(VOCAB + 4, HIDDEN),
    }
    for layer in range(LAYERS_OF_TARGET):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = normal(16, HIDDEN)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS_OF_TARGET,
        "tie_word_embeddings": False,
    }
    write(folder / "model.safetensors", tensors, config)
    return folder, tensors["lm_head.weight"][:VOCAB]


@pytest.fixture
def native(tmp_path):
    """Write random heads in the native layout; returns the folder."""

    def make(name="native", config=None, **options):
        plain = random_heads(**options)
        single = len(plain.lm_heads) != len(plain.layers)
        document = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "vocab_size": VOCAB,
            "medusa_fc_bias": options.get("bias", True) and options.get("num_layers") != 0,
            "original_lm_head": single,
            "base_model_name_or_path": "some/model",
            "unheard_of": {"kept": [1, 2]},
            "medusa": {"format_version": 1, "tree": [[0], [0, 0]], "notes": "kept"},
        }
        write(
            tmp_path / name / "model.safetensors", plain.spelled("vllm"), document | (config or {})
        )
        return tmp_path / name

    return make


def read(folder):
    """(tensors, config) of a folder, for any file name."""
    (path,) = (p for p in folder.iterdir() if p.suffix in (".safetensors", ".pt"))
    tensors = torch.load(path) if path.suffix == ".pt" else load_file(path)
    return tensors, json.loads((folder / "config.json").read_text())


@pytest.fixture(name="read")
def _read():
    return read


@pytest.fixture
def hidden():
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
