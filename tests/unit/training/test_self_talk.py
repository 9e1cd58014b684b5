from dataclasses import dataclass, field
from typing import Any

import pytest
from support import chat

from vllm_medusa.offline.batch import Delta, run_batch
from vllm_medusa.offline.prompts import Message, Prompt, PromptError
from vllm_medusa.training.distill import Plan
from vllm_medusa.training.self_talk import require_self_talk, user_turn

TALK = [{"role": "user", "content": "Is it user?"}, {"role": "assistant", "content": "It is."}]


@pytest.mark.parametrize(
    ("template", "opening", "end"),
    [
        (chat.CHATML, "<|im_start|>user\nIs it user?<|im_end|>\n<|im_start|>assistant\nIt is."
         "<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (chat.LLAMA_3, "<s><|start|>user<|end|>\n\nIs it user?<|eot|><|start|>assistant<|end|>\n\n"
         "It is.<|eot|><|start|>user<|end|>\n\n", "<|eot|>"),
        (chat.GEMMA, "<s><turn>user\nIs it user?</turn>\n<turn>model\nIt is.</turn>\n<turn>user\n",
         "</turn>"),
    ],
)  # fmt: skip
def test_user_turns_are_generated(template, opening, end):
    tokenizer = chat.tokenizer(template)
    prompt, token = user_turn(TALK, tokenizer)
    assert tokenizer.decode(prompt) == opening
    assert tokenizer.convert_ids_to_tokens(token) == end
    require_self_talk(tokenizer)


NO_HEADER = "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
DEAF = chat.CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (chat.VICUNA, "ends a user's turn with ' ' instead of a special token"),
        (chat.GLM_4, "ends a user's turn with ''"),
        (NO_HEADER, "no header before the user's text"),
        (DEAF, "drops the user's text"),
        (None, "needs a chat template"),
    ],
)
def test_templates_without_user_turns_are_refused(template, reason):
    with pytest.raises(PromptError) as error:
        require_self_talk(chat.tokenizer(template))
    assert reason in str(error.value)


@dataclass
class Talker:
    """An engine that plays both sides of a ChatML conversation from a script."""

    tokenizer: Any
    script: list[tuple[str, str]]  # text, finish reason
    requests: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def submit(self, key, prompt, seed, options=None):
        self.key, self.prompt = key, prompt
        self.requests.append(self.tokenizer.decode(prompt))
        self.options.append(dict(options or {}))

    def step(self) -> list[Delta]:
        text, reason = self.script[len(self.requests) - 1]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        said = text.removesuffix("<|im_end|>")
        return [Delta(self.key, said, ids, reason, prompt_token_ids=self.prompt)]

    def render(self, messages: list[Message]) -> list[int]:
        raise AssertionError("self-talk renders with its own tokenizer")


def talk(script: list[tuple[str, str]], prompt: Prompt, turns: int) -> tuple[Talker, Any]:
    tokenizer = chat.tokenizer(chat.CHATML)
    engine = Talker(tokenizer, script)
    plan = Plan(turns=turns, temperatures=(0.9,), tokenizer=tokenizer)
    (result,) = run_batch([prompt], engine, concurrency=1, session=plan.session)
    (line,) = plan.records(result)
    spans = [tokenizer.decode(line["token_ids"][s:e]) for s, e in line.get("generated", [])]
    return engine, (line, spans, tokenizer.decode(line.get("token_ids", [])))


DONE = "stop"
PROMPT = Prompt(0, 1, "p", turns=("Hi",))


def test_only_the_assistants_turns_are_trained():
    script = [("Hello.<|im_end|>", DONE), ("Why?<|im_end|>", DONE), ("So.<|im_end|>", DONE)]
    engine, (line, spans, text) = talk(script, PROMPT, 2)
    assert spans == ["Hello.<|im_end|>", "So.<|im_end|>"]
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>"
    )
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [o.get("stop_token_ids") for o in engine.options] == [None, [end], None]
    assert [o["temperature"] for o in engine.options] == [0.9, 1.0, 0.9]  # the user's turn: 1
    assert (line["finish_reason"], line["text"]) == (DONE, "So.")


def test_without_a_prompt_the_target_generates_the_first_turn():
    nothing = Prompt(0, 1, "talk-0")
    script = [("Hi?<|im_end|>", DONE), ("Hello.<|im_end|>", DONE)]
    engine, (line, spans, text) = talk(script, nothing, 1)
    assert engine.requests[0] == "<|im_start|>user\n"
    assert text == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>"
    assert spans == ["Hello.<|im_end|>"]
    # conversations with the same opening are in one group, others are not
    _, (same, *_) = talk(script, nothing, 1)
    _, (other, *_) = talk([("Ho?<|im_end|>", DONE), script[1]], nothing, 1)
    assert line["group"] == same["group"] != other["group"]


def test_a_truncated_first_turn_is_answered():
    script = [("Hi, I have", "length"), ("Hello.<|im_end|>", DONE)]
    _, (_, spans, _) = talk(script, Prompt(0, 1, "talk-0"), 1)
    assert spans == ["Hello.<|im_end|>"]


@pytest.mark.parametrize(
    "user", [("Why", "length"), ("<|im_end|>", DONE), ("Why?</s>", DONE), (" \n<|im_end|>", DONE)]
)
def test_a_truncated_user_turn_ends_it(user):
    engine, (_, spans, text) = talk([("Hello.<|im_end|>", DONE), user], PROMPT, 3)
    assert spans == ["Hello.<|im_end|>"]
    assert text.endswith("assistant\nHello.<|im_end|>"), "the incomplete user turn is removed"
    assert len(engine.requests) == 2


def test_the_prompts_turns_are_first():
    said = Prompt(0, 1, "p", history=({"role": "system", "content": "S"},), turns=("A", "B"))
    script = [(f"{word}<|im_end|>", DONE) for word in ("one", "two", "C", "three")]
    _, (_, spans, text) = talk(script, said, 3)
    assert spans == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>")
    assert "<|im_start|>user\nC<|im_end|>" in text
    _, (_, spans, text) = talk(script[:1], Prompt(0, 1, "p", text="Hey"), 1)
    assert text.startswith("<|im_start|>user\nHey<|im_end|>") and len(spans) == 1


def test_a_truncated_answer_ends_it():
    _, (line, spans, _) = talk([("Hel", "length")], PROMPT, 3)
    assert spans == ["Hel"] and line["finish_reason"] == "length"
