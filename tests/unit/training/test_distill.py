import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fake_engine import FakeEngine

from vllm_medusa.offline.batch import Delta, RequestRefused, run_batch
from vllm_medusa.offline.prompts import Message, Prompt
from vllm_medusa.offline.records import load_records, split_heldout
from vllm_medusa.training.distill import Plan

EOT = 3


@dataclass
class Scripted:
    """An engine with scripted answers; letters are tokens, and 3 ends a turn."""

    script: Mapping[str, tuple[Sequence[int], str]]  # key -> token ids, finish reason
    rewrite: bool = False  # the template renders earlier answers in upper case
    end: int = EOT  # end token of the template
    longest: int = 1000  # max length of a prompt
    requests: dict[str, list[int]] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)

    def submit(self, key, prompt, seed, options=None):
        if len(prompt) > self.longest:
            raise RequestRefused("too long")
        self.requests[key] = list(prompt.encode()) if isinstance(prompt, str) else prompt
        self.waiting.append(key)

    def step(self) -> list[Delta]:
        key = self.waiting.pop(0)
        ids, reason = self.script[key]
        text = bytes(t for t in ids if t != EOT).decode()
        return [Delta(key, text, ids, reason, prompt_token_ids=self.requests[key])]

    def render(self, messages: list[Message]) -> list[int]:
        ids = []
        for message in messages:
            words = message["content"]
            if self.rewrite and message["role"] == "assistant":
                words = words.upper()
            ids += [*f"[{message['role'][0]}]{words}".encode(), self.end]
        return [*ids, *b"[a]"]


def ids(text: str) -> list[int]:
    return list(text.replace("|", chr(EOT)).encode())


TALK = Prompt(0, 1, "t", turns=("x", "y", "z"))
ANSWERS = {
    "0.0": (ids("one|"), "stop"),
    "0.1": (ids("two|"), "stop"),
    "0.2": (ids("three"), "length"),
}


def lines_of(engine: Any, plan: Plan, *prompts: Prompt) -> list[dict[str, Any]]:
    results = run_batch(prompts, engine, concurrency=3, seed=plan.seed, session=plan.session)
    return [line for result in results for line in plan.records(result)]


def test_a_conversation_is_one_record_with_a_span_per_answer():
    (line,) = lines_of(Scripted(ANSWERS), Plan(turns=3, temperatures=(0.5,), seed=7), TALK)
    text = bytes(line["token_ids"]).decode().replace(chr(EOT), "|")
    assert text == "[u]x|[a]one|[u]y|[a]two|[u]z|[a]three"
    spans = [bytes(line["token_ids"][s:e]).decode() for s, e in line["generated"]]
    assert spans == ["one\x03", "two\x03", "three"]
    assert (line["index"], line["request_id"], line["seed"]) == (0, "t", 7)
    assert (line["temperature"], line["finish_reason"], line["text"]) == (0.5, "length", "three")


def test_answers_rendered_differently_are_separate_records():
    plan = Plan(turns=3)
    lines = lines_of(Scripted(ANSWERS, rewrite=True), plan, TALK)
    assert [line["index"] for line in lines] == [1, 2, 0], "the slot's own index comes last"
    trained = [
        [bytes(line["token_ids"][s:e]).decode() for s, e in line["generated"]] for line in lines
    ]
    assert trained == [["one\x03"], ["two\x03"], ["three"]]
    assert bytes(lines[2]["token_ids"]).startswith(b"[u]x\x03[a]ONE\x03[u]y\x03[a]TWO")


def test_records_of_a_conversation_are_not_split(tmp_path):
    """All records of a prompt's samples have one key; files without groups still load."""
    plan = Plan(samples=2, temperatures=(0.7,), turns=3)
    prompts = [Prompt(i, i + 1, f"t{i}", turns=(chr(97 + i), "y", "z")) for i in range(6)]
    script = {f"{slot}.{turn}": (ids(f"{slot}|"), "stop") for slot in range(12) for turn in "012"}
    slots = plan.slots(prompts, set())
    lines = lines_of(Scripted(script, rewrite=True, end=4), plan, *slots)
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records, bad = load_records(path)
    assert not bad and len(records) == 36
    of = {record.index // plan.turns // 2: record.prompt_key for record in records}
    assert len(set(of.values())) == 6
    assert all(r.prompt_key == of[r.index // plan.turns // 2] for r in records)
    train, heldout = split_heldout(records, 0.5)
    names = [{r.request_id.split("#")[0] for r in part} for part in (train, heldout)]
    assert len(heldout) == 18 and not names[0] & names[1]

    path.write_text("".join(json.dumps({**line, "group": None}) + "\n" for line in lines))
    old, bad = load_records(path)
    firsts = [r for r in old if bytes(r.token_ids).count(b"[a]") == 1]
    assert not bad and {r.prompt_key for r in firsts} == set(of.values()), "keys are the same"


def test_a_truncated_answer_ends_its_conversation():
    script = ANSWERS | {"0.1": (ids("tw"), "length")}
    (line,) = lines_of(Scripted(script), Plan(turns=3), TALK)
    assert bytes(line["token_ids"]).endswith(b"[u]y\x03[a]tw")
    assert len(line["generated"]) == 2


def test_answers_before_a_refusal_are_kept():
    engine = Scripted(ANSWERS, longest=10)
    plan = Plan(turns=3)
    (result,) = run_batch([TALK], engine, concurrency=1, session=plan.session)
    assert result.error is not None
    (line,) = plan.records(result)
    assert len(line["generated"]) == 1 and "error" not in line


def test_a_refused_prompt_is_recorded_as_an_error():
    engine = FakeEngine(longest_prompt=3)
    (line,) = lines_of(engine, Plan(turns=2), Prompt(5, 6, "p", text="too long"))
    assert line == {"index": 10, "request_id": "p", "error": "the prompt has 8 tokens"}
