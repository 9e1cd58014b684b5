"""Every format to every other; unsupported contents; complete or no outputs."""

import json
from pathlib import Path

import pytest
import torch
from support.commands import convert, die, killed
from support.random_heads import HIDDEN, VOCAB, random_heads, write

from vllm_medusa.convert.eagle import DRAFTER_FORMATS
from vllm_medusa.convert.job import FORMATS
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.files import FileRefused
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.options import described

FOREIGN = [name for name in FORMATS if name != "native"]
KINDS = {
    "own LM heads": {},
    "own LM heads, no biases": {"bias": False},
    "one LM head": {"num_lm_heads": 1},
    "shared LM head": {"num_lm_heads": 0},
    "shared, no biases": {"num_lm_heads": 0, "bias": False},
    "two layers, bf16": {"num_layers": 2, "num_lm_heads": 0, "dtype": torch.bfloat16},
    "one head": {"num_heads": 1},
    "no layers": {"num_layers": 0},
}


def identical(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


def test_the_command_offers_every_format():
    offered = set(next(o.choices for o in described(ConvertOptions) if o.name == "to"))
    assert offered == {*FORMATS, *DRAFTER_FORMATS}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_round_trip_keeps_every_bit(foreign, kind, native, target, read, tmp_path):
    """Only zero biases and copies of an LM head are added."""
    source = native(**kind)
    before, config = read(source)
    folder, lm_head = target
    if foreign == "v2" and kind.get("num_lm_heads") != 0:
        with pytest.raises(HeadsError, match="stores LM heads, which v2 does not"):
            convert(source, foreign, tmp_path / "there", target=folder)
        assert not (tmp_path / "there").exists()
        return
    done = convert(source, foreign, tmp_path / "there", target=folder)
    assert done.bytes == done.file.stat().st_size
    assert done.file.stat().st_mode == (tmp_path / "there" / "config.json").stat().st_mode
    convert(tmp_path / "there", "native", tmp_path / "back")
    after, config_after = read(tmp_path / "back")
    one = before.get("lm_head.weight", lm_head)
    for name in sorted({*before, *after}):
        if "lm_head" in name:
            same = torch.equal(after[name], before.get(name, one)) if name in after else True
        elif name not in before:
            same = name.endswith(".bias") and not after[name].any()
        else:
            same = before[name].dtype == after[name].dtype and before[name].equal(after[name])
        assert same, name
    assert config_after["base_model_name_or_path"] == config["base_model_name_or_path"]
    medusa = config_after["medusa"]
    assert {key: medusa[key] for key in config["medusa"]} == config["medusa"]
    assert medusa["target"] == target_fingerprint(folder)


def test_shared_lm_heads_are_pickled_once(native, target, tmp_path):
    convert(native(num_lm_heads=0), "v1", tmp_path / "a", target=target[0])
    stored = torch.load(tmp_path / "a" / "medusa_lm_head.pt")
    copies = [stored[f"{head}.1.weight"] for head in range(3)]
    assert len({copy.data_ptr() for copy in copies}) == 1
    assert copies[0].untyped_storage().nbytes() == 4 * VOCAB * HIDDEN  # without padding


@pytest.mark.parametrize("num_lm_heads", [0, 1])
def test_a_token_map_is_kept_if_supported(num_lm_heads, native, target, read, tmp_path):
    token_map = torch.tensor([5, 0, 19, 7])
    options = {"num_lm_heads": num_lm_heads, "rows": 4, "token_map": token_map}
    source = native(config={"truncated_vocab_size": 4}, **options)
    for foreign in ("v1", "v2", "tgi", "tensorrt-llm"):
        with pytest.raises(HeadsError, match="token_map"):
            convert(source, foreign, tmp_path / foreign, target=target[0])
        assert not (tmp_path / foreign).exists()
    convert(source, "vllm", tmp_path / "there", target=target[0])
    tensors, config = read(tmp_path / "there")
    assert tensors["token_map"].dtype == torch.int64
    assert tensors["lm_head.weight"].shape == (4, HIDDEN)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB, 4)


@pytest.mark.parametrize(
    ("options", "formats", "message"),
    [
        ({"lm_bias": True}, ("v1", "vllm", "tgi", "tensorrt-llm"), "LM heads with biases"),
        ({"rows": 4, "token_map": torch.tensor([5, 0, 19, 7])}, ("vllm",), "stock vLLM"),
        ({"num_lm_heads": 0}, ("v1", "vllm", "tensorrt-llm"), "Pass --target"),
        ({"num_lm_heads": 0, "num_layers": 2}, ("tgi",), "Pass --target"),
        ({}, ("v2",), "stores LM heads"),
    ],
)
def test_lossy_conversions_are_refused(options, formats, message, native, tmp_path):
    source = native(**options)
    for foreign in formats:
        with pytest.raises(HeadsError, match=message):
            convert(source, foreign, tmp_path / foreign)
        assert not (tmp_path / foreign).exists()
    convert(source, "native", tmp_path / "native_again")


def test_padding_rows_are_cut_for_vllm_only(native, target, read, tmp_path):
    source = native(rows=VOCAB + 4)
    done = convert(source, "vllm", tmp_path / "a", target=target[0])
    assert any("4 padding rows" in note for note in done.notes)
    assert read(tmp_path / "a")[0]["lm_heads.2.weight"].shape == (VOCAB, HIDDEN)
    convert(source, "v1", tmp_path / "b")
    convert(tmp_path / "b", "native", tmp_path / "c")
    identical(read(source)[0], read(tmp_path / "c")[0])


def test_another_target_causes_an_error_or_a_warning(native, target, tmp_path):
    folder, _ = target
    source = native(
        num_lm_heads=0,
        config={"vocab_size": VOCAB, "medusa": {"target": {"scheme": 1, "sha256": "0"}}},
    )
    done = convert(source, "v1", tmp_path / "a", target=folder)
    assert "made for another target" in done.warnings[0]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    with pytest.raises(HeadsError, match="hidden size 8"):
        convert(source, "v1", tmp_path / "b", target=folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 30}))
    with pytest.raises(HeadsError, match="the target has 30"):
        convert(native("own"), "v1", tmp_path / "b", target=folder)


@pytest.mark.parametrize("options", [{}, {"token_map": torch.tensor([5, VOCAB + 4])}])
def test_a_target_without_a_vocabulary_size_needs_enough_rows(options, native, target, tmp_path):
    folder, _ = target
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": None}))
    stated = None if options else VOCAB + 5
    source = native(num_lm_heads=0, config={"vocab_size": stated}, **options)
    with pytest.raises(HeadsError, match=f"needs an LM head of {VOCAB + 5} tokens"):
        convert(source, "vllm", tmp_path / "a", target=folder)


def test_heads_of_a_full_medusa_2_model(target, full, read, tmp_path):
    done = convert(full, "v1", tmp_path / "heads")
    assert done.info.includes_base and "same checkpoint" in done.warnings[0]
    identical(random_heads(3, 1).spelled("v1"), read(tmp_path / "heads")[0])
    config = read(tmp_path / "heads")[1]
    assert "architectures" not in config
    # the base is the heads' target: by itself and in the full checkpoint
    known = config["medusa"]["target"]["sha256"]
    assert all(target_fingerprint(path)["sha256"] == known for path in (target[0], full))


def test_only_heads_are_replaced_and_only_with_overwrite(native, tmp_path):
    source, out = native(), tmp_path / "out"
    convert(source, "v1", out)
    with pytest.raises(HeadsError, match="--overwrite"):
        convert(source, "tgi", out)
    convert(source, "tgi", out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(FileRefused, match=r"tokenizer\.json"):
        convert(source, "v1", out, overwrite=True)
    for read_from in (source, source / "model.safetensors"):
        with pytest.raises(HeadsError, match="being read"):
            convert(read_from, "v1", source, overwrite=True)
    for inside in (source / "v1", source / ".." / source.name / "a" / "b"):
        with pytest.raises(HeadsError, match=f"is inside, {source}, which is being read"):
            convert(source, "v1", inside)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["native", "out"]


@pytest.fixture
def full(target, read, tmp_path):
    """A full Medusa-2 model in one file; returns its folder."""
    base, config = read(target[0])
    tensors = base | random_heads(3, 1).spelled("v1", "medusa_head.")
    write(tmp_path / "full" / "model.safetensors", tensors, config)
    return tmp_path / "full"


@pytest.mark.parametrize("kind", ["a model", "a full one", "with heads", "a config alone"])
def test_other_files_are_never_replaced(kind, target, full, native, read, tmp_path):
    source, out = native(), tmp_path / "out"
    write(out / "model.safetensors", *read(full if kind == "a full one" else target[0]))
    if kind == "with heads":
        write(out / "medusa_lm_head.safetensors", random_heads(3, 1).spelled("v1"), {})
    elif kind == "a config alone":
        (out / "model.safetensors").unlink()
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(HeadsError, match=r"holds no Medusa|also holds a model|not a file of plain"):
        convert(source, "vllm", out, target=target[0], overwrite=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_kill_leaves_no_partial_output(native, read, tmp_path):
    """Killed between tensors and config: the old output remains, and the next run works."""
    source, out = native(), tmp_path / "out"
    convert(source, "v1", out)
    before, _ = read(out)

    def dying():
        Path.write_text = die
        convert(source, "tgi", out, overwrite=True)

    assert killed(dying)
    identical(before, read(out)[0])
    rests = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert rests == [".out.part"]
    convert(source, "tgi", out, overwrite=True)
    assert sorted(p.name for p in out.iterdir())[-1] == "medusa_lm_head.safetensors"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
