"""The commands on the test model's heads: what they print and their exit status."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_medusa import cli
from vllm_medusa.heads import peek_heads, target_fingerprint

ASSETS = Path(__file__).parents[3] / "tests" / "assets"
HEADS, TARGET = str(ASSETS / "heads"), str(ASSETS / "target")


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command: its exit status, what it printed, and to standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["vllm-medusa", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_there_and_back(command, tmp_path):
    there, back = tmp_path / "v1", tmp_path / "native"
    status, out, err = command("convert", HEADS, "--to", "v1", "-o", there, "--target", TARGET)
    assert (status, err) == (0, "")
    assert "5 heads of 3 layers as v1" in out
    assert "note: each head was given a copy of the target's LM head" in out
    assert command("convert", there, "--to", "native", "-o", back)[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (Path(HEADS), back))
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = peek_heads(back).config
    assert config["medusa"]["target"] == target_fingerprint(TARGET)
    assert [entry["command"][1] for entry in config["medusa"]["provenance"]] == ["convert"] * 2


def test_inspect_says_what_it_is_and_that_it_fits(command, tmp_path):
    command("convert", HEADS, "--to", "native", "-o", tmp_path / "a", "--target", TARGET)
    status, out, err = command("inspect", tmp_path / "a", "--target", TARGET)
    assert (status, err) == (0, "")
    for words in (
        "num_heads            5\n",
        "num_lm_heads         0\n",
        "parameters           986880\n",
        "12 draft nodes",
        "|- 0",
        "vllm-medusa convert",
        "ok fingerprint",
        f"{TARGET}: it fits\n",
    ):
        assert words in out, words
    status, out, _ = command("inspect", HEADS, "--json")  # for programs
    found = json.loads(out)
    assert (status, found["num_heads"], found["fits"]) == (0, 5, True)


def test_inspect_says_that_it_does_not_fit(command, tmp_path):
    shutil.copytree(TARGET, tmp_path / "tuned")
    weights = load_file(tmp_path / "tuned" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    heads = tmp_path / "heads"
    command("convert", HEADS, "--to", "native", "-o", heads, "--target", TARGET)
    status, out, _ = command("inspect", heads, "--target", tmp_path / "tuned")
    assert (status, "NO fingerprint" in out, "IT DOES NOT FIT" in out) == (1, True, True)


def test_a_model_is_not_overwritten(command, tmp_path):
    out = tmp_path / "onlymodel"
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(ASSETS / "target" / name, out / name)
    options = ("--to", "vllm", "--output", out, "--target", TARGET, "--overwrite")
    status, _, err = command("convert", HEADS, *options)
    assert status == 2
    assert "model.safetensors is, or holds, something else than heads" in err
    assert target_fingerprint(out) == target_fingerprint(TARGET)


@pytest.mark.parametrize("form", ["native", "vllm", "v1", "tensorrt-llm"])
def test_heads_are_no_target(command, tmp_path, form):
    heads = tmp_path / "heads"
    command("convert", HEADS, "--to", form, "-o", heads, "--target", TARGET)
    status, out, err = command("inspect", HEADS, "--target", heads)
    assert (status, out) == (2, "")
    assert "Give the" in err


def test_inspect_of_a_target_and_of_neither(command, tmp_path):
    status, out, _ = command("inspect", TARGET)
    assert status == 2
    assert "a target model, not heads" in out
    assert "LlamaForCausalLM" in out
    status, out, err = command("inspect", tmp_path)
    assert (status, out) == (2, "")
    assert "error:" in err
    status, out, _ = command("inspect", tmp_path, "--json")
    assert (status, json.loads(out)["target"]) == (2, None)
    (tmp_path / "config.json").write_text("{}")
    status, out, err = command("inspect", HEADS, "--target", tmp_path)
    assert (status, out) == (2, "") and str(tmp_path) in "".join(err.split("\n"))
