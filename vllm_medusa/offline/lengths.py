"""How many tokens prompts have, counted as the engine will: by the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_medusa.offline.conversations import render
from vllm_medusa.offline.prompts import BadLine, Message, Prompt, PromptError


@dataclass(frozen=True)
class Length:
    """Tokens of a prompt."""

    prompt: Prompt
    first: int  # before the first answer
    whole: int  # of all its turns, without the answers

    def positions(self, max_tokens: int) -> int:
        """What prompt and answers take at most."""
        return self.whole + max(1, len(self.prompt.turns)) * max_tokens


def measure_prompts(prompts: Iterable[Prompt], tokenizer: Any) -> Iterator[Length | BadLine]:
    """Count each prompt's tokens; one that the chat template refuses is a bad line."""
    for prompt in prompts:
        try:
            yield Length(prompt, *_count(prompt, tokenizer))
        except PromptError as error:
            yield BadLine(prompt.index, prompt.line, str(error))


def has_template(tokenizer: Any) -> bool:
    """Whether conversations are rendered; without a chat template they are plain text."""
    return getattr(tokenizer, "chat_template", None) is not None


def _count(prompt: Prompt, tokenizer: Any) -> tuple[int, int]:
    if prompt.token_ids:
        return len(prompt.token_ids), len(prompt.token_ids)
    if prompt.text is not None:
        count = _length(prompt.text, tokenizer)
        return count, count
    messages: list[Message] = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
    first = _tokens(messages, tokenizer)
    for turn in prompt.turns[1:]:
        messages.append({"role": "assistant", "content": "..."})
        messages.append({"role": "user", "content": turn})
    return first, first if len(prompt.turns) == 1 else _tokens(messages, tokenizer)


def _tokens(messages: list[Message], tokenizer: Any) -> int:
    if not has_template(tokenizer):
        return _length("".join(message["content"] for message in messages), tokenizer)
    text = render(messages, tokenizer, for_answer=True)
    return _length(text, tokenizer, add_special_tokens=False)


def _length(text: str, tokenizer: Any, **how: bool) -> int:
    return len(tokenizer(text, verbose=False, **how)["input_ids"])  # no warning of long ones
