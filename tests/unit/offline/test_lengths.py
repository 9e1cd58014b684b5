"""Prompts counted by a real tokenizer, with and without a chat template."""

from pathlib import Path

import pytest
from support.assets import TARGET
from transformers import AutoTokenizer

from vllm_medusa.offline import defaults
from vllm_medusa.offline.defaults import Length
from vllm_medusa.offline.prompts import Prompt, PromptError

DEMO = Path(TARGET)
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer():
    found = AutoTokenizer.from_pretrained(DEMO)
    found.chat_template = TEMPLATE
    return found


def measure(tokenizer, *prompts: Prompt, room: int | None = None) -> list[Length]:
    found = defaults.measure(Path("p"), prompts, tokenizer, room, "refuse")
    assert list(found) == [prompt.line for prompt in prompts]
    return list(found.values())


def test_lengths_are_in_tokens_not_bytes(tokenizer) -> None:
    text = "def add(one, two):\n    return one + two\n" * 20
    (length,) = measure(tokenizer, Prompt(0, 1, "0", text=text))
    assert length.whole == len(tokenizer(text)["input_ids"]) < len(text) / 2
    assert length.positions(10) == length.whole + 10


def test_a_conversation_is_rendered_and_each_turn_is_answered(tokenizer) -> None:
    one, two = Prompt(0, 1, "0", turns=("def f():",)), Prompt(1, 2, "1", turns=("def f():", "x"))
    first, length = measure(tokenizer, one, two)
    rendered = tokenizer("<user>def f():\n<a>", add_special_tokens=False)["input_ids"]
    assert first.whole == len(rendered) < length.whole
    assert length.positions(100) == length.whole + 200
    with pytest.raises(PromptError, match=f"line 2: {first.whole} tokens; the target's limit"):
        measure(tokenizer, two, room=first.whole - 1)
    tokenizer.chat_template = None
    (plain,) = measure(tokenizer, one)
    assert plain.whole == len(tokenizer("def f():")["input_ids"])
