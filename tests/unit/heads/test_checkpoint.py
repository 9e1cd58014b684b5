import json
from pathlib import Path

import pytest
import torch
from support.random_heads import HIDDEN, VOCAB, random_heads, write, write_sharded

from vllm_medusa.heads.checkpoint import load_heads, peek_heads, save_heads, update_config
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.model import HeadsError, MedusaHeads

SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB}


def check(source, plain, hidden, target_lm_head, **options):
    """Load, and compare the logits with the naive forward pass of the written tensors."""
    heads, info = load_heads(source, **{**SIZES, **options})
    logits = heads.compute_logits(heads(hidden), lambda rows: rows @ target_lm_head.T)
    expected = plain.logits(hidden, target_lm_head)
    torch.testing.assert_close(logits, expected[:, : heads.num_heads], rtol=1e-5, atol=1e-5)
    assert peek_heads(source) == info
    return heads, info


MAP = torch.tensor([5, 0, 19, 7])
PUBLISHED = {  # published like this, with five heads
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 7
}  # fmt: skip
READ = [  # how random heads are stored, and the detected format
    ("v1", {"num_heads": 5}, PUBLISHED),
    ("v1", {"num_layers": 2, "bias": False}, None),
    ("v1", {"num_layers": 0}, None),
    ("v1", {"prefix": "medusa_head."}, None),
    ("v1", {"prefix": "medusa_heads."}, None),
    ("v1", {"prefix": "model.medusa_head.", "num_layers": 2}, None),
    ("v2", {"num_lm_heads": 0}, {"version": "2", "base_model_name_or_path": "N/A"}),
    ("v2", {"num_lm_heads": 0, "num_layers": 2}, None),
    ("vllm", {"num_layers": 2, "lm_bias": True}, {"num_heads": 9}),
    ("vllm", {"bias": False, "num_lm_heads": 1}, {}),
    *(
        ("vllm", {"num_lm_heads": count, "rows": 4, "token_map": MAP}, {"vocab_size": VOCAB})
        for count in (3, 1, 0)
    ),
]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(("format_", "options", "config"), READ)
def test_every_format_is_read(format_, options, config, suffix, tmp_path, hidden, target_lm_head):
    prefix = (options := dict(options)).pop("prefix", "")
    plain = random_heads(**options)
    tensors = plain.spelled("vllm" if format_ == "vllm" else "v1", prefix)
    write(tmp_path / f"medusa_lm_head.{suffix}", tensors, config)
    for source in (tmp_path, tmp_path / f"medusa_lm_head.{suffix}"):
        heads, info = check(source, plain, hidden, target_lm_head)
    num_heads, layers = len(plain.layers), len(plain.layers[0])
    assert (info.format, info.num_heads, info.num_layers) == (format_, num_heads, layers)
    assert info.bias == (layers > 0 and options.get("bias", True))
    assert info.lm_head_bias == options.get("lm_bias", False)
    assert info.num_lm_heads == options.get("num_lm_heads", num_heads)
    assert info.vocab_size == (None if format_ == "v2" else VOCAB)
    assert info.base_model == ("lmsys/vicuna-7b-v1.3" if config is PUBLISHED else None)
    assert not info.includes_base and info.dtype == torch.float32
    if info.token_map:
        assert torch.equal(heads.token_map, MAP) and info.draft_vocab_size == 4


def test_token_map_over_whole_lm_heads_picks_their_rows(tmp_path, hidden):
    """As in vLLM: rows beyond the map's length mean that the LM head is not truncated yet."""
    plain = random_heads(2, 1, lm_bias=True, token_map=MAP)
    write(tmp_path / "model.safetensors", plain.spelled("vllm"), {"vocab_size": VOCAB})
    heads, _ = load_heads(tmp_path, **SIZES)
    logits = heads.compute_logits(heads(hidden))
    expected = plain.logits(hidden)[..., MAP]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_one_lm_head_named_as_that_of_head_0(tmp_path, hidden, target_lm_head):
    plain = random_heads(3, 1, num_lm_heads=1)
    tensors = plain.spelled("vllm")
    tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    write(tmp_path / "model.safetensors", tensors, {"original_lm_head": True})
    assert check(tmp_path, plain, hidden, target_lm_head)[1].num_lm_heads == 1
    write(tmp_path / "model.safetensors", tensors, {})
    with pytest.raises(HeadsError, match=r"lacks 'lm_heads.1.weight', 'lm_heads.2.weight'"):
        load_heads(tmp_path, **SIZES)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("num_lm_heads", [3, 0])
def test_full_medusa_2_checkpoints(suffix, num_lm_heads, tmp_path, hidden, target_lm_head):
    plain = random_heads(3, 1, num_lm_heads=num_lm_heads)
    tensors = plain.spelled("v1", "medusa_head.")
    names = sorted(tensors)
    stem = "pytorch_model" if suffix == "bin" else "model"
    base = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "lm_head.weight": torch.ones(2),
    }
    shards = {
        f"{stem}-00001-of-00003.{suffix}": base,
        f"{stem}-00002-of-00003.{suffix}": {name: tensors[name] for name in names[:2]},
        f"{stem}-00003-of-00003.{suffix}": {name: tensors[name] for name in names[2:]},
    }
    write_sharded(tmp_path, shards, f"{stem}.{suffix}.index.json", {"medusa_num_heads": 5})
    (tmp_path / f"{stem}-00001-of-00003.{suffix}").write_bytes(b"never opened")
    _, info = check(tmp_path, plain, hidden, target_lm_head)
    assert (info.format, info.includes_base) == ("full", True)
    assert info.num_lm_heads == num_lm_heads


@pytest.mark.parametrize("num_lm_heads", [4, 1, 0])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_only_the_first_heads_are_read(
    count, num_lm_heads, tmp_path, monkeypatch, hidden, target_lm_head
):
    read, original = [], CheckpointFiles.tensors

    def tensors(self, names):
        for name, tensor in original(self, names):
            read.append(name)
            yield name, tensor

    monkeypatch.setattr(CheckpointFiles, "tensors", tensors)
    plain = random_heads(4, 2, num_lm_heads=num_lm_heads)
    write(tmp_path / "model.safetensors", plain.spelled("vllm"))
    heads, info = check(tmp_path, plain, hidden, target_lm_head, max_heads=count)
    assert (heads.num_heads, info.num_heads) == (min(count, 4), 4)
    parts = {name: name.split(".")[1] for name in plain.spelled("vllm")}  # a head's number
    used = [name for name, part in parts.items() if part == "weight" or int(part) < count]
    assert sorted(read) == sorted(used)


def test_old_pickles_that_cannot_be_mapped(tmp_path, hidden, target_lm_head):
    plain = random_heads(2, 1)
    path = tmp_path / "medusa_lm_head.pt"
    torch.save(plain.spelled("v1"), path, _use_new_zipfile_serialization=False)
    check(path, plain, hidden, target_lm_head)


# --- refused checkpoints ---


NAN = torch.full((HIDDEN, HIDDEN), torch.nan)
BROKEN = [
    ({"1.0.linear.weight": None}, r"lacks '1\.0\.linear\.weight' \("),
    ({"9.1.weight": torch.zeros(VOCAB, HIDDEN)}, r"lacks '3\.0\.linear\.weight'.* more tensors"),
    ({"0.1.bias": torch.zeros(VOCAB)}, r"lacks '1\.1\.bias', '2\.1\.bias'"),
    ({"extra.scale": torch.zeros(1)}, r"has unexpected 'extra\.scale'"),
    (
        {"2.1.weight": None, "2.2.weight": torch.zeros(VOCAB, HIDDEN)},
        r"lacks '2\.1\.weight' and has unexpected '2\.2\.weight'",
    ),
    ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, "has unexpected"),
    ({"0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN, 1)}, r"'0\.0\.linear\.weight' has shape"),
    ({"1.0.linear.bias": torch.zeros(4)}, r"'1\.0\.linear\.bias' has shape \[4\].*must be \[8\]"),
    ({"0.0.linear.bias": torch.zeros(HIDDEN, dtype=torch.int8)}, "is int8; it must be one of"),
    ({"token_map": torch.zeros(VOCAB)}, "'token_map' is float32; it must be one of int32, int64"),
    ({"token_map": torch.tensor([1, VOCAB])}, "'token_map' holds token id 20; .* 0 to 19"),
    ({"token_map": torch.tensor([1, 1])}, "'token_map' has a duplicate token"),
    ({"2.0.linear.weight": NAN}, r"'2\.0\.linear\.weight' holds NaN or infinity.*Retrain"),
]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_broken_checkpoints_name_the_tensor(file, changes, message, tmp_path):
    """With tensors replaced, added, or (None) removed."""
    tensors = random_heads(3, 1).spelled("v1") | changes
    write(tmp_path / file, {name: each for name, each in tensors.items() if each is not None})
    with pytest.raises(HeadsError, match=message):
        load_heads(tmp_path, **SIZES)


def test_errors_use_the_files_tensor_names(tmp_path):
    tensors = random_heads(2, 1).spelled("v1", "medusa_head.")
    del tensors["medusa_head.1.0.linear.bias"]
    tensors["medusa_head.0.0.gate.weight"] = torch.zeros(1)
    tensors["blocks.0.layers.0.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(1)
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(HeadsError) as caught:
        peek_heads(tmp_path)
    assert "lacks 'medusa_head.1.0.linear.bias' and has unexpected" in str(caught.value)
    assert "'medusa_head.0.0.gate.weight'" in str(caught.value)
    assert "'blocks.0.layers.0.weight'" in str(caught.value)
    assert "norm" not in str(caught.value)


def test_another_models_heads(tmp_path):
    write(tmp_path / "medusa_lm_head.pt", random_heads(2, 1).spelled("v1"))
    with pytest.raises(HeadsError, match="hidden size 8; the target has 16"):
        load_heads(tmp_path, hidden_size=16, vocab_size=VOCAB)
    for vocab in (VOCAB - 1, VOCAB + 1):
        with pytest.raises(HeadsError, match=rf"vocabulary 20 tokens; the target has {vocab}"):
            load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=vocab)


def test_padding_rows_require_a_vocabulary_size(tmp_path, hidden):
    plain = random_heads(2, 1, lm_bias=True)
    write(tmp_path / "medusa_lm_head.pt", plain.spelled("v1"), {"vocab_size": 18})
    heads, info = load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=18)
    assert (info.vocab_size, info.lm_head_rows) == (18, VOCAB)
    logits = heads.compute_logits(heads(hidden))
    torch.testing.assert_close(logits, plain.logits(hidden)[..., :18], rtol=1e-5, atol=1e-5)
    with pytest.raises(HeadsError, match=r'need a "vocab_size" of 17 in config\.json'):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=17)


def test_values_too_large_for_the_dtype(tmp_path):
    plain = random_heads(2, 1)
    plain.layers[1][0][0][0, 0] = 1e5
    write(tmp_path / "medusa_lm_head.pt", plain.spelled("v1"))
    with pytest.raises(HeadsError, match=r"'1\.0\.linear\.weight' holds .* 1e\+05, too large for"):
        load_heads(tmp_path, **SIZES, dtype=torch.float16)
    load_heads(tmp_path, **SIZES, dtype=torch.bfloat16)


# --- writing ---


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_lm_heads", ["own", 1, 0])
@pytest.mark.parametrize("token_map", [None, torch.tensor([4, 9, 1])])
def test_saved_heads_are_loaded(num_heads, num_lm_heads, token_map, tmp_path):
    count = num_heads if num_lm_heads == "own" else num_lm_heads
    heads = MedusaHeads(num_heads, 2, HIDDEN, VOCAB, True, count > 0, token_map, num_lm_heads=count)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    tree = [[0], [1], [0, 0]]
    config = {"tree": tree, "base_model_name_or_path": "some/model", "provenance": {"seed": 3}}
    assert save_heads(tmp_path / "heads", heads, config) == tmp_path / "heads"
    loaded, info = load_heads(tmp_path / "heads", **SIZES)
    state = loaded.state_dict()
    assert state.keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(state[name], tensor)
    assert (info.tree, info.base_model) == (tree, "some/model")
    assert info.config["medusa"]["provenance"] == {"seed": 3}
    written = {path.name for path in (tmp_path / "heads").iterdir()}
    assert written == {"config.json", "model.safetensors"}


def test_config_has_the_fields_of_stock_vllm(tmp_path):
    save_heads(tmp_path, MedusaHeads(3, 2, HIDDEN, VOCAB, bias=False))
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3,
        "num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB, "medusa_fc_bias": False, "original_lm_head": False,
        "medusa": {"format_version": 1},
    }  # fmt: skip


def test_heads_that_cannot_be_saved(tmp_path):
    heads = MedusaHeads(2, 1, HIDDEN, VOCAB)
    for value in (object(), float("nan")):
        with pytest.raises(HeadsError, match="plain JSON"):
            save_heads(tmp_path, heads, {"tree": value})
    with torch.no_grad():
        heads.blocks[0].weight[1, 0, 0] = torch.nan
    with pytest.raises(HeadsError, match=r"'blocks\.1\.layers\.0\.weight' holds NaN"):
        save_heads(tmp_path, heads)
    assert list(Path(tmp_path).iterdir()) == []
    write(tmp_path / "medusa_lm_head.pt", random_heads(2, 1).spelled("v1"))  # preferred by readers
    with pytest.raises(HeadsError, match=r"already has medusa_lm_head\.pt"):
        save_heads(tmp_path, MedusaHeads(2, 1, HIDDEN, VOCAB))


def test_update_config_keeps_everything_else(tmp_path):
    save_heads(tmp_path, MedusaHeads(2, 1, HIDDEN, VOCAB), {"tree": [[0]], "theirs": 1})
    path = tmp_path / "config.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({"unheard_of": [1], **before}))
    update_config(tmp_path, tree=[[0], [0, 0]], calibration={"texts": 3}, theirs=None, folder="x")
    after = json.loads(path.read_text())
    medusa = {"format_version": 1, "tree": [[0], [0, 0]], "calibration": {"texts": 3}}
    medusa["folder"] = "x"
    assert after == {"unheard_of": [1], **before, "medusa": medusa}
    assert peek_heads(tmp_path).tree == [[0], [0, 0]]


def test_the_config_is_written_after_the_weights(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_medusa.heads.checkpoint.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_heads(tmp_path, MedusaHeads(2, 1, HIDDEN, VOCAB))
    assert not any(tmp_path.iterdir())
