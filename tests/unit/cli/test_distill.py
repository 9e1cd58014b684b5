import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import chat, commands
from support.assets import TARGET
from support.commands import said

from vllm_medusa.offline.records import load_records
from vllm_medusa.training import distill

pytestmark = pytest.mark.usefixtures("engine")
run = partial(commands.run, "distill", "target")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "p0", "turns": ["a", "b"]}, *({"prompt": f"text {i}"} for i in range(5))]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_bytes().splitlines()), key=lambda r: r["index"])


def test_records_and_their_origin(prompts, tmp_path, engine, capfd):
    out = tmp_path / "r.jsonl"
    options = ("--samples", 3, "--temperature", 0.5, 1.0, "--seed", 9, "--top-p", 0.9)
    assert run("-i", prompts, "-o", out, *options, "--max-tokens", 50) == 0
    records, bad = load_records(out)
    assert not bad and len(records) == 21
    assert [r.request_id for r in records[1:8:2]] == ["p0#0", "p0#1", "p0#2", "1#1"]
    assert [r.temperature for r in records[1:8:2]] == [0.5, 1.0, 0.5, 1.0]
    assert [r.index for r in records[:8]] == [0, 1, 2, 3, 4, 5, 6, 8], "two indices per text"
    assert [line["seed"] for line in lines(out)[:8:2]] == [9, 10, 11, 12]
    ((settings, sampling, extra),) = engine.built
    assert settings["speculative_config"] is None and extra["seeded"] is True
    assert sampling.temperature == 1.0, "engines with seeds must know whether any is above 0"
    assert (sampling.max_tokens, sampling.top_p) == (50, 0.9)
    generated = sum(r.num_generated for r in records)
    assert f"{generated} tokens in" in said(capfd)
    manifest = json.loads((tmp_path / "r.jsonl.run/run.json").read_text())
    assert manifest["provenance"]["data"][0]["file"] == "prompts.jsonl"
    texts = {"samples": 3, "temperatures": [0.5, 1.0], "self_talk": False, "turns": 2}
    assert manifest["settings"]["texts"] == texts


def test_an_interrupted_job_resumes_to_the_same_records(prompts, tmp_path, engine, capfd):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    options = ("-i", prompts, "--samples", 2, "--batch", 3)
    assert run(*options, "-o", whole) == 0
    engine.steps_left = 8
    assert run(*options, "-o", broken) == 130
    assert 0 < len(lines(broken)) < len(lines(whole))
    with broken.open("ab") as file:
        file.write(b'{"index": 5, "tor')
    engine.steps_left = None
    assert run(*options, "-o", broken) == 0
    said = capfd.readouterr().err
    assert "resuming: " in said and "removed an incomplete last line (17 bytes)" in said
    assert lines(broken) == lines(whole)
    content = broken.read_bytes()
    assert run(*options, "-o", broken) == 0
    assert "nothing to do" in capfd.readouterr().err and broken.read_bytes() == content


def test_a_conversation_is_complete_after_a_kill_between_its_lines(prompts, tmp_path):
    """Without a chat template, answers are tokenized differently in the next prompt."""
    out = tmp_path / "r.jsonl"
    assert run("-i", prompts, "-o", out, "--batch", 1) == 0
    whole = lines(out)
    assert [r["request_id"] for r in whole].count("p0") == 2
    content = out.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["index"] for line in content[:2]] == [1, 0]
    out.write_bytes(content[0])
    assert run("-i", prompts, "-o", out, "--batch", 1) == 0
    assert lines(out) == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "3", "--temperature", "0", "0.7"], "2 copies of a text at temperature 0"),
        (["--turns", "2"], "--turns 2 needs --self-talk"),
        (["--conversations", "2"], "either --prompts FILE, or --conversations"),
        (["--conversations", "2", "--self-talk"], "either --prompts FILE, or --conversations"),
        (["--seed", "-1"], "'-1' is not allowed; input should be greater"),
        (["--top-k", "-5"], "'-5' is not allowed; input should be greater"),
        (["--stop", ".", ""], "'' is not allowed; string should have at least 1"),
        (["--column", ""], "'' is not allowed; string should have at least 1"),
        (["--speculative-config", '{"acceptance": "typical"}'], "the target's own distribution"),
    ],
)
def test_contradictions_are_refused(prompts, tmp_path, options, message, engine, capfd):
    assert run("-i", prompts, "-o", tmp_path / "r.jsonl", *options) == 2
    assert message in said(capfd)
    assert engine.built == [] and not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [(TARGET, "--self-talk needs a chat template"), (None, "can't be read as a model")],
)
def test_self_talk_is_checked_before_an_engine_starts(
    prompts, tmp_path, engine, capfd, model, words
):
    options = ("-i", prompts, "-o", tmp_path / "r.jsonl", "--self-talk")
    assert commands.run("distill", model or tmp_path, *options) == 2
    assert words in said(capfd)
    assert engine.built == []


def test_self_talk_reports_conversations_that_ended_early(
    prompts, tmp_path, monkeypatch, engine, capfd
):
    monkeypatch.setattr(distill, "_self_talk_tokenizer", lambda model: chat.tokenizer(chat.CHATML))
    engine.ends_by = "length"
    assert run("-i", prompts, "-o", tmp_path / "r.jsonl", "--self-talk", "--turns", 2) == 0
    text = said(capfd)
    assert "6 of 6 conversations ended before 2 answers" in text
