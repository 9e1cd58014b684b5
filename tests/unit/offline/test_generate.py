"""The generate job without its command: results, notes and input."""

import pytest
from support.fake_engine import FakeProcess
from support.recorded_progress import RecordingProgress

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


def test_lookup_works_with_or_without_heads():
    kind = Speculation
    assert kind().speculative_config() is None
    alone = {"method": "medusa", "lookup": True}
    assert kind(lookup=True).speculative_config() == alone
    assert kind(lookup=True, budget="7").speculative_config() == alone | {"budget": 7}
    with_heads = kind(speculative_model="h", lookup=True).speculative_config()
    assert with_heads == alone | {"model": "h"}
