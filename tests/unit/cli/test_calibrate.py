import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assets import TARGET, VOCAB
from support.commands import run, said
from transformers import AutoModelForCausalLM

from vllm_medusa.calibration.observations import Observations
from vllm_medusa.heads import peek_heads
from vllm_medusa.heads.checkpoint import update_config
from vllm_medusa.heads.provenance import provenance

ROOM = 2048  # tokens that the target reads


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Four texts that the test model's target wrote, two of each of two prompts."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    torch.manual_seed(0)
    rows = []
    for prompt in ([0, 523, 287, 2510, 10, 548], [0, 882, 1120, 1892, 201]):
        texts = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            num_return_sequences=2,
            do_sample=True,
            temperature=0.8,
            top_k=0,
        )
        for ids in texts.tolist():
            spans = [[len(prompt), len(ids)]]
            rows.append({"token_ids": ids, "generated": spans, "temperature": 0.8})
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_records_to_a_tree_that_serving_uses(heads, records, capsys):
    drawn, out = heads.parent / "tree.png", heads.parent / "tree.json"
    before = json.loads((heads / "config.json").read_text())
    assert run("calibrate", TARGET, heads, "--data", records) == 0
    shown = capsys.readouterr().out
    for words in ("4 texts", "temperature 0.8", "ECE", "asked", "tokens per step"):
        assert words in shown
    observations = Observations.load(heads)
    assert observations.num_texts == 4 and observations.prompts.tolist() == [0, 0, 1, 1]
    config = json.loads((heads / "config.json").read_text())
    summary = config["medusa"]["calibration"]
    assert summary["positions"] == len(observations.ranks) > 60
    assert summary["temperature"] == 0.8
    assert len(summary["accuracy"]["overall"]) == 5
    assert summary["source"]["data"][0]["file"] == "records.jsonl"
    assert len(summary["source"]["target"]["sha256"]) == 64
    entry = config["medusa"]["provenance"][-1]
    assert entry["data"] == summary["source"]["data"]
    assert config["medusa"]["tree"] == before["medusa"]["tree"], "that is `tree`'s to write"

    arguments = ["tree", heads, "-n", 9, "--draw", drawn, "--output", out]
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    served = '"tree": "heads" serves it'
    for words in ("held out", "nodes", "root", served):
        assert words in shown
    assert drawn.stat().st_size > 10_000
    tree = peek_heads(heads).tree
    assert tree is not None and len(tree) == 9 and tree == json.loads(out.read_text())["tree"]
    medusa = json.loads((heads / "config.json").read_text())["medusa"]
    assert len(medusa["tree_tokens_per_step"]) == 9 == len(medusa["tree_source"]["tokens_per_step"])
    assert medusa["calibration"] == summary


def test_text_of_unknown_origin_is_taken_with_a_warning(heads, records, tmp_path, capsys):
    rows = [json.loads(line) | {"temperature": None} for line in records.read_text().splitlines()]
    path = tmp_path / "foreign.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert run("calibrate", TARGET, heads, "--data", path) == 0
    captured = capsys.readouterr()
    assert "trained on" not in captured.err
    assert "2 of 2 texts don't say at which temperature" in " ".join(captured.err.split())
    assert "not the target's own" in captured.out
    summary = json.loads((heads / "config.json").read_text())["medusa"]["calibration"]
    assert summary["temperature"] is None
    assert run("tree", heads, "-n", 2) == 0
    assert "text not by the target" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "warned"), [("train", True), ("calibrate", False)])
def test_texts_the_heads_were_trained_on(heads, records, tmp_path, capsys, command, warned):
    """Other commands read texts too, of a target in a folder named "train"."""
    target = tmp_path / "train"
    target.symlink_to(TARGET)
    update_config(heads, provenance=provenance(["vllm-medusa", command, "train"], [records]))
    assert run("calibrate", target, heads, "--data", records) == 0
    assert ("the heads were trained on" in said(capsys)) == warned


def test_no_more_choices_than_the_heads_have(heads, records, capsys):
    weights = load_file(heads / "model.safetensors") | {"token_map": torch.arange(100)}
    save_file(weights, heads / "model.safetensors")
    assert run("calibrate", TARGET, heads, "--data", records, "--top-k", 101) == 2
    assert "--top-k is 101; the heads score 100 tokens" in said(capsys)


@pytest.mark.parametrize(
    ("token_ids", "arguments", "message"),
    [
        ([], ["--temperature", "0.3"], "it has 0.8"),
        ([5] * (ROOM + 1), [], f"line 1: {ROOM + 1} tokens; at most {ROOM}"),
        ([5] * 8 + [VOCAB], [], f"is {VOCAB}, outside the vocabulary (from 0 to {VOCAB - 1})"),
    ],
)
def test_what_can_not_work_is_refused(
    heads, records, tmp_path, capsys, token_ids, arguments, message
):
    if token_ids:
        records = tmp_path / "records.jsonl"
        records.write_text(json.dumps({"token_ids": token_ids, "generated": [[1, 9]]}) + "\n")
    before = (heads / "config.json").read_bytes()
    assert run("calibrate", TARGET, heads, "--data", records, *arguments) == 2
    assert message in said(capsys)
    assert (heads / "config.json").read_bytes() == before
    assert not (heads / "calibration.safetensors").exists()


def test_heads_must_lie_in_a_folder(records, capsys):
    assert run("calibrate", TARGET, "someone/heads", "--data", records) == 2
    assert "not a local folder" in capsys.readouterr().err
