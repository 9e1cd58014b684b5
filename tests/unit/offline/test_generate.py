"""The generate job without its command: results, notes and input."""

import json
import shutil
from pathlib import Path

import pytest
from support.assets import TARGET
from support.commands import RecordingProgress
from support.fake_engine import FakeProcess

from vllm_medusa.offline import generate as job
from vllm_medusa.offline import prompts
from vllm_medusa.offline.options import GenerateOptions, Speculation


@pytest.fixture
def reads(monkeypatch):
    """The parsed prompt files, with an engine that needs no model."""
    read = []
    real = prompts.read_prompts
    monkeypatch.setattr(
        prompts, "read_prompts", lambda path, *rest: read.append(path) or real(path, *rest)
    )
    engine = FakeProcess(max_tokens=6, step_sizes=(2, 1), longest_prompt=20)
    monkeypatch.setattr(job, "EngineProcess", lambda *_, **__: engine)
    return read


def test_results_are_returned_and_reported(tmp_path, reads):
    path = tmp_path / "p.txt"
    path.write_text("one\n" + "x" * 30 + "\nthree\n")
    files = {"prompts": path, "output": tmp_path / "o.jsonl"}
    options = GenerateOptions(model="target", **files, on_bad_line="skip", batch=1)
    progress = RecordingProgress()
    done = job.generate(options, progress)
    assert (done.output, done.failed) == (tmp_path / "o.jsonl", 1)
    assert done.speed is not None and done.speed.tokens > 0
    assert [values[1:3] for values in progress.counts] == [(1, 3), (2, 3), (3, 3)]
    assert progress.warnings == [f"skipped {path}, line 2: the prompt has 30 tokens"]
    assert reads == [path], "parsed once"
    again = RecordingProgress()
    assert job.generate(options, again).speed is None
    assert again.notes[1:] == ["resuming: 3 of 3 are done", "nothing to do"]


@pytest.mark.parametrize(
    ("limit", "template", "words"),
    [
        (None, None, r"line 3: \d+ tokens; the target's limit before an answer is 2047"),
        (9, None, r"2 bad lines.*line 2: .* is 8\n  line 3"),
        (None, "{{ messages[0].content ", "line 1: the chat template refuses the conversation"),
    ],
)
def test_unanswerable_prompts_are_refused_before_an_engine_starts(
    tmp_path, monkeypatch, limit, template, words
):
    target, path = tmp_path / "target", tmp_path / "p.jsonl"
    target.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / file, target)
    if template:
        (target / "chat_template.jinja").write_text(template)
    texts = ("a b", "x = 1\n" * 20, "x = 1\n" * 3000)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    monkeypatch.setattr(job, "EngineProcess", lambda *_, **__: pytest.fail("it was started"))
    output = tmp_path / "o.jsonl"
    options = GenerateOptions(model=str(target), prompts=path, output=output, max_model_len=limit)
    with pytest.raises(prompts.PromptError, match=f"(?s){words}"):
        job.generate(options)
    assert not output.exists()


def test_lookup_works_with_or_without_heads():
    lookup = {"lookup": True, "budget": 7}
    assert Speculation().speculation() is None
    alone = {"method": "medusa", **lookup}
    assert Speculation(speculative_config=lookup).speculation() == alone
    with_heads = Speculation(speculative_model="h", speculative_config=lookup).speculation()
    assert with_heads == alone | {"model": "h"}
