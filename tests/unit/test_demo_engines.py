"""From an engine's steps to the demo's recording, without an engine."""

import threading
from pathlib import Path

import pytest
from support.assets import tokenizer
from support.fake_engine import FakeEngine

from demo import engines
from demo.engines import TimedConversation, pieces, record, take
from vllm_medusa.job import SILENT
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.prompts import Prompt


def test_each_step_has_a_time_and_tokens():
    engine = FakeEngine(max_tokens=32, step_sizes=(3, 1), step_seconds=0.02)
    prompt = Prompt(0, 1, "p", turns=("Say something.",))
    how = {"concurrency": 1, "seed": 6, "session": TimedConversation}
    (result,) = run_batch([prompt], engine, **how)
    (answer,) = result.answers
    assert len(answer.token_ids) > 8
    taken = take(answer, tokenizer())
    assert [len(step.pieces) for step in taken.steps] == answer.delivered
    assert taken.token_ids == tuple(answer.token_ids) and taken.finish_reason == "length"
    times = [step.at for step in taken.steps]
    assert all(b - a >= 0.02 for a, b in zip([0, *times], times, strict=False))


@pytest.mark.parametrize("text", ["def f(a, b):\n    return a", "naïve 日本 🙂 ok", "</s>"])
def test_pieces_add_up_to_the_text(text):
    ids = tokenizer().encode(text)
    assert "".join(pieces(ids, tokenizer())) == tokenizer().decode(ids, skip_special_tokens=True)
    assert len(pieces(ids, tokenizer())) == len(ids)


def test_no_piece_splits_a_character():
    ids = tokenizer().encode("🙂🙂")
    assert len(ids) > 2
    found = pieces(ids, tokenizer())
    assert "".join(found) == "🙂🙂" and "\N{REPLACEMENT CHARACTER}" not in "".join(found)


def test_a_refused_engine_stops_the_start_of_the_other(monkeypatch):
    def start(settings, sampling):
        if settings.speculative_config is None:
            threading.Event().wait()
        raise ValueError("a tree of no nodes")

    monkeypatch.setattr(engines, "EngineProcess", start)
    with pytest.raises(ValueError, match="no nodes"):
        record(Path("target"), {"method": "medusa"}, [], [0.0], 8, {}, SILENT)
