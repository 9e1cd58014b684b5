"""Engine settings on a CPU: they fit the available memory, counted from the prompts' tokens."""

from pathlib import Path

import pytest
from support import chat

from vllm_medusa.job import Progress
from vllm_medusa.offline import defaults
from vllm_medusa.offline.comparison import affordable
from vllm_medusa.offline.defaults import COMPILE_FROM, Length, TargetSizes, plan_engine
from vllm_medusa.offline.prompts import Prompt, PromptError

GB = 10**9
# 30 layers of 3 key-value heads of 64 values in bfloat16, as SmolLM2-135M has them
SMOL = TargetSizes(134_500_000, 269_000_000, per_token=2 * 30 * 3 * 64 * 2, positions=8192)
CHATS = [600] * 339 + [1900]  # one long text among short prompts


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch):
    def made(lengths, available=24 * GB, **more):
        monkeypatch.setattr(defaults, "available_memory", lambda: available)
        return plan_engine("target", lengths, 64, **more)

    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(TargetSizes, "of", lambda *_: SMOL)
    return made


def test_only_long_jobs_are_compiled_and_a_long_prompt_does_not_affect_the_others(plan) -> None:
    assert "enforce_eager" in plan(CHATS, tokens=COMPILE_FROM - 1).arguments
    long = plan(CHATS, tokens=COMPILE_FROM)
    assert "enforce_eager" not in long.arguments
    assert 1900 < long.arguments["max_model_len"] < 2000
    assert 63 * 600 + 1900 < long.arguments["kv_cache_memory_bytes"] / SMOL.per_token < 64 * 1100
    assert long.memory < 4 * GB


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("available", [5 * GB, 8 * GB, 24 * GB])
def test_never_more_than_is_available(plan, available: int, engines: int) -> None:
    planned = plan([8192] * 100, available, engines=engines)
    assert planned.memory <= available
    assert planned.arguments["kv_cache_memory_bytes"] >= 8192 * SMOL.per_token


def test_too_little_memory_for_one_text_is_refused(plan) -> None:
    with pytest.raises(ValueError, match=r"2 engines .* of 8192 tokens.* 3\.0 GB available"):
        plan([8192], 3 * GB, engines=2)


@pytest.mark.parametrize(
    ("seconds", "turn", "measured"),
    [
        (1000, 1.0, (32, 3)),  # all of it
        (80, 1.0, (32, 2)),  # fewer rounds
        (40, 1.0, (20, 2)),  # fewer prompts
        (8, 1.0, (8, 1)),  # one round
        (1, 100.0, (6, 1)),  # the minimum
    ],
)
def test_rounds_and_prompts_that_fit_a_time_limit(seconds, turn, measured) -> None:
    assert affordable(seconds, turn, 32, 3, 6) == measured


def measure(tokenizer, *prompts: Prompt, room: int | None = None) -> list[Length]:
    found = defaults.measure(Path("p"), prompts, tokenizer, room, "refuse")
    assert list(found) == [prompt.line for prompt in prompts]
    return list(found.values())


def test_lengths_are_in_tokens_not_bytes() -> None:
    text, tokenizer = "def add(one, two):\n    return one + two\n" * 20, chat.tokenizer(chat.CHATML)
    (length,) = measure(tokenizer, Prompt(0, 1, "0", text=text))
    assert length.whole == len(tokenizer(text)["input_ids"]) < len(text) / 2
    assert length.positions(10) == length.whole + 10


@pytest.mark.parametrize("template", [chat.CHATML, None])
def test_plain_texts_for_a_chat_model_are_warned_of(template: str | None) -> None:
    tokenizer, said = chat.tokenizer(chat.CHATML), list[str]()
    tokenizer.chat_template = template
    progress = Progress()
    progress.warn = said.append  # type: ignore[method-assign]
    prompts = [Prompt(0, 1, "0", text="Why?"), Prompt(1, 2, "1", turns=("Why?",))]
    defaults.measure(Path("p.jsonl"), prompts, tokenizer, None, "refuse", progress)
    texts = ["1 prompt of p.jsonl will be continued as plain text" in text for text in said]
    assert texts == [template is not None]


def test_a_conversation_is_rendered_and_each_turn_is_answered() -> None:
    tokenizer = chat.tokenizer(chat.CHATML)
    one, two = Prompt(0, 1, "0", turns=("def f():",)), Prompt(1, 2, "1", turns=("def f():", "x"))
    first, length = measure(tokenizer, one, two)
    text = "<|im_start|>user\ndef f():<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert first.whole == len(rendered) < length.whole
    assert length.positions(100) == length.whole + 200
    with pytest.raises(PromptError, match=f"line 2: {first.whole} tokens; the target's limit"):
        measure(tokenizer, two, room=first.whole - 1)
    tokenizer.chat_template = None
    (plain,) = measure(tokenizer, one)
    assert plain.whole == len(tokenizer("def f():")["input_ids"])
