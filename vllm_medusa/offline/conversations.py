"""Convert conversations and plain texts to token ids, with the spans of the assistant.

A conversation is rendered as a whole with the tokenizer's chat template. An assistant's span starts
where the prompt of that turn ends, exactly as it would be sent to the model, and ends after the
token that ends the turn, because the model has to generate that token too:

    <|im_start|>user / Hi<|im_end|> / <|im_start|>assistant / Hello!<|im_end|> /
                                                              ^^^^^^^^^^^^^^^^ span

Some templates rewrite earlier turns (for example, they drop reasoning), so that no mask is
correct: such a conversation is refused with the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from vllm_medusa.offline.prompts import MESSAGES, TEXT, Message, PromptError, Text, validated

CONVERSATION_KEYS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # of ShareGPT's speakers


class _ShareGpt(BaseModel):
    speaker: Literal["system", "human", "user", "gpt", "chatgpt", "assistant"] = Field(alias="from")
    value: Text


_SHARE_GPT = TypeAdapter(Annotated[list[_ShareGpt], Field(min_length=1)])
_Encoded = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]  # token ids, spans


def encode_text(value: Any, tokenizer: Any) -> _Encoded:
    """Token ids of a plain text, and one span of all tokens except the first.

    Raises PromptError: not a text, or too short to predict anything.
    """
    validated(TEXT, value, "text")
    ids = tuple(tokenizer(value)["input_ids"])
    if len(ids) < 2:
        raise PromptError("'text' is a single token: there is nothing to predict")
    return ids, ((1, len(ids)),)


def encode_conversation(value: Any, key: str, tokenizer: Any) -> _Encoded:
    """Token ids of a conversation up to the last assistant turn, and the assistant's spans.

    ``key`` is "messages" (role, content) or "conversations" (ShareGPT's from, value).

    Raises PromptError: it is not a conversation, has no assistant turn, or the chat template does
    not show which tokens the assistant generates.
    """
    messages = _messages(value, key)
    answers = [place for place, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise PromptError(f"{key!r} has no assistant turn: there is nothing to train on")
    if all(m["role"] == "system" for m in messages[: answers[0]]):
        raise PromptError(f"{key!r} begins with an assistant turn, without a prompt")
    messages = messages[: answers[-1] + 1]
    text = render(messages, tokenizer)
    cuts = []  # start and end of each answer, in characters
    for place in answers:
        prompt = render(messages[:place], tokenizer, for_answer=True)
        if not text.startswith(prompt):
            raise PromptError(
                f"the chat template rewrites earlier turns: the prompt of message "
                f"{place + 1} is not a prefix of the whole conversation"
            )
        so_far = render(messages[: place + 1], tokenizer)
        content = messages[place]["content"]
        cuts += [len(prompt), _end_of_turn(text, len(prompt), content, so_far, tokenizer)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = []
    for cut in cuts:
        before = [end for _, end in encoded["offset_mapping"] if end <= cut]
        if len(before) < len(encoded["input_ids"]):
            start, end = encoded["offset_mapping"][len(before)]
            if start < cut < end:
                raise PromptError(
                    f"the tokens of the turn that ends in {text[max(0, cut - 20) : cut]!r} extend "
                    f"into the next text, {text[cut : cut + 20]!r}"
                )
        places.append(len(before))
    return tuple(encoded["input_ids"]), tuple(zip(places[::2], places[1::2], strict=True))


def _messages(value: Any, key: str) -> list[Message]:
    if key == "messages":
        messages = [message.model_dump() for message in validated(MESSAGES, value, key)]
    else:
        found = validated(_SHARE_GPT, value, key)
        messages = [{"role": _ROLES.get(m.speaker, m.speaker), "content": m.value} for m in found]
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise PromptError(f"message {number} of {key!r} is an empty assistant turn")
    return messages


def _end_of_turn(text: str, start: int, content: str, so_far: str, tokenizer: Any) -> int:
    """The end in ``text`` of the assistant turn that starts at ``start``.

    ``so_far`` is the conversation up to this turn as rendered by the template: the prefix it shares
    with the whole text belongs to this turn, not to the next. Added tokens may end a turn.
    """
    turn = text[start : common_length(text, so_far)]
    for words in (content, content.rstrip(), content.strip()):  # templates may trim
        if turn.lstrip().startswith(words.lstrip()):
            end = turn.index(words) + len(words)
            return start + end + len(turn_end(turn[end:], tokenizer) or "")
    raise PromptError(
        f"the chat template does not put the assistant's text {content!r:.40} where its turn "
        f"begins, or changes it when more text follows: {turn[:40]!r}"
    )


def common_length(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def turn_end(rest: str, tokenizer: Any) -> str | None:
    """The end-of-turn prefix of ``rest``: whitespace and one of the added tokens."""
    blank = len(rest) - len(rest.lstrip())
    added = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    ends = [token for token in added if token and rest.startswith(token, blank)]
    return rest[: blank + len(max(ends, key=len))] if ends else None


def render(messages: list[Message], tokenizer: Any, *, for_answer: bool = False) -> str:
    """A conversation rendered by the tokenizer's chat template.

    Raises PromptError: there is no chat template, or it refuses the conversation.
    """
    from jinja2 import TemplateError

    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(
            "the target's tokenizer has no chat template, which conversations need; add one, or "
            "train on 'text' or records of `vllm-medusa distill`"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=for_answer, tokenize=False
        )
    except TemplateError as error:
        raise PromptError(f"the chat template refuses the conversation: {error}") from None
    return text


def encode_rendered(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a rendered conversation, which includes all special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prompt_ids(messages: list[Message], tokenizer: Any) -> list[int]:
    """Token ids of the prompt for the target's next answer.

    Without a chat template, texts are joined unchanged. Raises PromptError: the template refuses
    them.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        text = "".join(message["content"] for message in messages)
        return list(tokenizer(text, verbose=False)["input_ids"])  # no warning for long texts
    return list(encode_rendered(render(messages, tokenizer, for_answer=True), tokenizer))
