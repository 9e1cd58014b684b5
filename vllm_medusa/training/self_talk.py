"""Self-talk: the target generates both sides of a conversation (Medusa, section 2.3.2).

The prompt's own turns (or its text, as the first user turn) come first. Then the conversation is
rendered up to the start of the next user turn, and the target generates it up to the token
that ends a turn. A prompt without turns is a conversation opened by the target (Magpie,
arXiv 2406.08464). User turns are sampled at temperature 1, so that conversations
differ. Only a chat template that marks both ends of a turn, like

    <|im_start|>user / words <|im_end|>

allows a model to generate user turns; others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_medusa.offline.batch import Answer, Engine, Request, RequestRefused
from vllm_medusa.offline.conversations import common_length, encode_rendered, render, turn_end
from vllm_medusa.offline.prompts import Message, Prompt, PromptError

_PLACEHOLDER = "7f3c0d5e words of a user"  # marks the position of the user's text
_USER_TEMPERATURE = 1.0
_USER_TOKENS = 256  # max tokens per user turn


def user_turn(messages: list[Message], tokenizer: Any) -> tuple[list[int], int]:
    """Render a conversation, empty or ending with the assistant, up to the next user's text.

    Returns the token ids, and the token that ends the user's turn.

    Raises PromptError: the chat template has no header for a user turn, or no token that ends one.
    """
    text = render([*messages, {"role": "user", "content": _PLACEHOLDER}], tokenizer)
    if text.count(_PLACEHOLDER) != 1:
        raise PromptError("the chat template drops the user's text. Use it without --self-talk.")
    before, after = text.split(_PLACEHOLDER)
    header = before[common_length(before, render(messages, tokenizer)) :] if messages else before
    if not header.strip():
        raise PromptError(
            f"the chat template has no header before the user's text (only {header!r}), so nothing "
            "makes the target generate a user turn. Use it without --self-talk."
        )
    end = turn_end(after, tokenizer)
    if end is None:
        raise PromptError(
            f"the chat template ends a user's turn with {after[:20]!r} instead of a special "
            "token, so the target can't end one. Use it without --self-talk."
        )
    token = tokenizer.convert_tokens_to_ids(end.strip())
    return list(encode_rendered(before, tokenizer)), token


def require_self_talk(tokenizer: Any) -> None:
    """Refuse a target whose chat template does not support generating user turns.

    Raises PromptError: it does not, with the reason.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(
            "--self-talk needs a chat template, but the target's tokenizer has none: run "
            "without --self-talk."
        )
    user_turn(
        [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}], tokenizer
    )


@dataclass
class SelfTalk:
    """A session with ``turns`` answers; user turns beyond the prompt's are generated too.

    It ends early at a truncated answer or an empty user turn. An opening that was
    truncated at `_USER_TOKENS` is answered as it is.
    """

    prompt: Prompt
    temperature: float
    turns: int
    tokenizer: Any
    answers: list[Answer] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    end: int | None = None  # the token that ends the user's turn

    def __post_init__(self) -> None:
        opening = () if self.prompt.text is None else (self.prompt.text,)
        self.given = [*opening, *self.prompt.turns]
        self.messages = list(self.prompt.history)

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        if self.answers:
            last = self.answers[-1]
            self.messages.append({"role": last.role, "content": last.text})
        if self.given and (not self.messages or self.messages[-1]["role"] != "user"):
            self.messages.append({"role": "user", "content": self.given.pop(0)})
        try:
            if self.messages and self.messages[-1]["role"] == "user":
                self.answers.append(Answer())
                text = render(self.messages, self.tokenizer, for_answer=True)
                prompt = list(encode_rendered(text, self.tokenizer))
                return Request(prompt, {"temperature": self.temperature})
            self.answers.append(Answer(role="user"))
            prompt, self.end = user_turn(self.messages, self.tokenizer)
        except PromptError as error:
            raise RequestRefused(str(error)) from None
        options = {
            "temperature": _USER_TEMPERATURE,
            "stop_token_ids": [self.end],
            "max_tokens": _USER_TOKENS,
        }
        return Request(prompt, options)

    @property
    def finished(self) -> bool:
        """See `vllm_medusa.offline.batch.Session`."""
        last = self.answers[-1]
        if last.role == "user":
            cut = last.token_ids[-1:] != [self.end] and len(self.answers) > 1
            return cut or not last.text.strip()
        answered = sum(answer.role == "assistant" for answer in self.answers)
        return answered >= self.turns or last.finish_reason != "stop"
