"""`convert` and `inspect`: their output for heads and EAGLE drafters, and their exit status."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assets import HEADS, TARGET
from support.eagle import Eagle3

from vllm_medusa.heads.checkpoint import peek_heads, update_config
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.offline.comparison import speculation
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.offline.options import CompareOptions, Speculation


def target(folder, **changes):
    """A target with only shapes; returns its folder."""
    folder.mkdir(exist_ok=True)
    config = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 4} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


def test_round_trip(command, tmp_path):
    there, back = tmp_path / "v1", tmp_path / "native"
    status, out, err = command("convert", HEADS, "--to", "v1", "-o", there, "--target", TARGET)
    assert (status, err) == (0, "")
    assert "5 heads of 3 layers as v1" in out
    assert "note: each head has a copy of the target's LM head" in out
    assert command("convert", there, "--to", "native", "-o", back)[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (Path(HEADS), back))
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = peek_heads(back).config
    assert config["medusa"]["target"] == target_fingerprint(TARGET)
    assert [entry["command"][1] for entry in config["medusa"]["provenance"]] == ["convert"] * 2


def test_inspect_describes_it_and_checks_that_it_fits(command, tmp_path):
    command("convert", HEADS, "--to", "native", "-o", tmp_path / "a", "--target", TARGET)
    status, out, err = command("inspect", tmp_path / "a", "--target", TARGET)
    assert (status, err) == (0, "")
    for words in (
        "num_heads            5\n",
        "num_lm_heads         0\n",
        "parameters           986880\n",
        "12 draft nodes",
        "── 0",
        "everything: --json",
        "ok fingerprint",
        f"{TARGET}: it fits\n",
    ):
        assert words in out, words
    assert out.index("it fits") < out.index("num_heads") and "provenance" not in out
    status, out, _ = command("inspect", tmp_path / "a", "--target", target(tmp_path / "t"))
    assert status == 1 and "NO fingerprint" in out and "IT DOES NOT FIT" in out
    status, out, _ = command("inspect", HEADS, "--json")  # for programs
    found = json.loads(out)
    assert (status, found["num_heads"], found["fits"]) == (0, 5, True)


@pytest.mark.parametrize("form", ["native", "vllm", "v1", "tensorrt-llm"])
def test_heads_are_not_a_target(command, tmp_path, form):
    heads = tmp_path / "heads"
    command("convert", HEADS, "--to", form, "-o", heads, "--target", TARGET)
    status, out, err = command("inspect", HEADS, "--target", heads)
    assert (status, out) == (2, "")
    assert "Pass the" in err


def test_inspect_of_a_target_and_of_neither(command, tmp_path):
    status, out, err = command("inspect", TARGET)
    assert (status, out) == (2, "")
    assert "Is this a target without MTP?" in err
    status, out, err = command("inspect", tmp_path)
    assert (status, out) == (2, "")
    assert "error:" in err
    status, out, _ = command("inspect", tmp_path, "--json")
    assert status == 2 and json.loads(out)["error"]
    (tmp_path / "config.json").write_text("{}")
    status, out, err = command("inspect", HEADS, "--target", tmp_path)
    assert (status, out) == (2, "") and str(tmp_path) in "".join(err.split("\n"))


def test_eagle_3(command, tmp_path):
    drafter = Eagle3(torch.zeros(512, 64), 2 * torch.arange(200), (1, 2, 3)).save(tmp_path / "e")
    code, out, _ = command("inspect", drafter, "--target", target(tmp_path / "t"))
    assert code == 0 and "method               eagle3" in out and "[1, 2, 3]" in out
    assert "draft_vocab_size     200" in out and "it fits" in out
    for changes, word in (
        ({"hidden_size": 32}, "NO hidden size"),
        ({"num_hidden_layers": 2}, "NO aux"),
    ):
        code, out, _ = command("inspect", drafter, "--target", target(tmp_path / "t", **changes))
        assert code == 1 and word in out and "IT DOES NOT FIT" in out
    trained = target_fingerprint(target(tmp_path / "t"))
    for own, word in ((trained, "ok fingerprint"), (trained | {"sha256": "0"}, "NO fingerprint")):
        update_config(tmp_path / "e", target=own)
        code, out, _ = command("inspect", drafter, "--target", tmp_path / "t")
        assert (code, word in out) == (int("NO" in word), True)
    file = tmp_path / "e" / "model.safetensors"
    save_file(load_file(file) | {"d2t": torch.full((200,), 400)}, file)
    code, out, _ = command("inspect", drafter, "--json")
    assert code == 1 and json.loads(out)["checks"][0]["verdict"] == "does not fit"


MIMO = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
NORM = "mtp_layers.0.final_layernorm.weight"
MODULE = [NORM, *(f"mtp_layers.0.{of}.weight" for of in ("token_layernorm", "hidden_layernorm"))]
MODULE += ["mtp_layers.0.input_proj.weight"]
MODULE += [f"{at}.{of}.weight" for at in ("layers.0", "layers.3", "mtp_layers.0") for of in "xy"]


def mimo(folder, edit="", **changes):
    """The names of a MiMo with four layers; returns its folder."""
    target(folder, **MIMO | changes)
    names = [*MODULE, edit[1:]] if edit.startswith("+") else MODULE
    names = [n for n in names if not (edit.startswith("-") and n.startswith(edit[1:]))]
    save_file({f"model.{n}": torch.zeros(4) for n in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("edit", "status", "words"),
    [
        ("", 0, "ok tensors: the MTP module has all 6 ok trees: supported for MiMoForCausalLM"),
        ("-layers.0", 0, "ok tensors"),
        ("-layers.", 0, "? tensors: the target has no layer like"),
        ("+mtp_layers.0.mlp.down_proj.weight", 0, "? tensors: the target has no layer like"),
        ("+layers.3.x.weight_scale", 0, "? tensors: not compared: quantized, or experts in"),
        ("+layers.0.x.weight_scale", 0, "? tensors: not compared: quantized, or experts in"),
        ("+mtp_layers.0.embed_tokens.weight", 1, "NO tensors: the MTP module has 'model.mtp_l"),
        ("+mtp_layers.0.x.bias", 1, "NO tensors: the MTP module has 'model.mtp_layers.0.x.bias'"),
        (f"-{NORM}", 1, f"NO tensors: the MTP module lacks 'model.{NORM}'; vLLM would not start"),
        ("-mtp", 1, "NO tensors: its config has an MTP module, but its files do not"),
    ],
)
def test_the_tensors_of_an_mtp_module(command, tmp_path, edit, status, words):
    """``edit``: a tensor added (+), or all of a prefix removed (-)."""
    code, out, _ = command("inspect", mimo(tmp_path, edit))
    assert code == status and words in " ".join(out.split())
    found = json.loads(command("inspect", tmp_path, "--json")[1])
    assert found["modules"] == 1 and found["fits"] == (status == 0)


def test_an_mtp_module_in_a_file_without_index(command, tmp_path):
    """vLLM reads all files of the folder; here, only the usual one is."""
    mimo(tmp_path, "-mtp")
    save_file({f"model.{NORM}": torch.zeros(4)}, tmp_path / "mtp.safetensors")
    code, out, _ = command("inspect", tmp_path)
    assert code == 0 and "? tensors: not all of the folder's files" in " ".join(out.split())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert command("inspect", tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"num_nextn_predict_layers": 2}, 1, "need one MTP module, not 2"),
        (
            {"architectures": ["Qwen3NextForCausalLM"]},
            1,
            "NO trees: not with the MTP module of Qwen3NextForCausalLM, only with those of MiMo",
        ),
        ({"num_nextn_predict_layers": 0}, 2, "Is this a target without MTP?"),
    ],
)
def test_a_target_with_mtp(command, tmp_path, changes, status, words):
    folder = mimo(tmp_path, **changes)
    code, out, err = command("inspect", folder)
    assert code == status and words in " ".join((out + err).split())
    found = json.loads(command("inspect", folder, "--json")[1])
    assert status == 2 or (found["modules"] > 0 and found["fits"] == (status == 0))


def test_a_target_with_mtp_has_no_other_target(command, tmp_path):
    status, _, err = command("inspect", mimo(tmp_path), "--target", TARGET)
    assert status == 2 and "omit --target" in err


def test_commands_recognize_a_drafters_folder(tmp_path):
    """`generate`, `compare` and others, by `--speculative-model`."""
    drafter = Eagle3(torch.zeros(512, 64), torch.arange(0, 512, 2), (1, 2, 3)).save(tmp_path / "e")
    own = {"method": "eagle3", "model": drafter, "tree": "dynamic"}
    assert medusa_config(drafter) == own
    more = {"tree": "chain", "budget": 4}
    assert medusa_config(drafter, more) == own | more
    assert medusa_config(str(tmp_path))["method"] == "medusa"
    Speculation(speculative_model=drafter, speculative_config={"tree": {"width": 4}})
    with pytest.raises(ValueError, match="width"):
        Speculation(speculative_model=drafter, speculative_config={"tree": "mc_sim_7b_63"})
    more = {"budgets": (80, 4, 60), "speculative_config": {"tree": {"depth": 1}}}
    options = CompareOptions(target="t", heads=drafter, prompts=tmp_path, **more)
    assert [*speculation(options)] == [4, 10, None]
