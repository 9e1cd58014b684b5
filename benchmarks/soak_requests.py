"""Requests of all kinds for a server, from a seed; and what came back for one.

What a request is answered is written down so that two servers can be compared: status and type of
an error, or for each choice text or tool calls and why it ended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 12}, key: kind},
                "required": ["path", key],
                "additionalProperties": False,
            },
        },
    }
    for name, text, key, kind in (
        ("read_file", "Read a file.", "lines", {"type": "integer", "minimum": 1, "maximum": 999}),
        ("list_folder", "List a folder.", "order", {"enum": ["name", "size", "time"]}),
    )
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
CHAT, COMPLETION = "chat.completions", "completions"


@dataclass(frozen=True)
class Asked:
    """A request."""

    kind: str
    route: str  # of the client: `CHAT` or `COMPLETION`
    body: Mapping[str, Any]
    stream: bool = False
    cancel_after: int | None = None  # chunks of a stream, then the client goes away
    compared: bool = True  # it has the same answer every time, plain vLLM's
    refused: bool = False  # the answer has to be an error of the client's: 400, 404 or 422

    @property
    def key(self) -> str:
        """Equal for requests that are answered alike."""
        return json.dumps([self.route, self.body], sort_keys=True)


@dataclass
class Answer:
    """What a client got."""

    error: tuple[int, str] | None = None  # status and type
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str | None] = field(default_factory=dict)
    tools: dict[int, list[list[str]]] = field(default_factory=dict)  # names and arguments
    cancelled: bool = False


def requests(prompts: Sequence[str], count: int, seed: int) -> list[Asked]:
    """So many requests of all kinds, some of them the same."""
    draw = random.Random(seed)
    return [draw.choice(_MAKERS)(prompts, draw) for _ in range(count)]


def _body(draw: random.Random, **more: Any) -> dict[str, Any]:
    return {"max_tokens": draw.choice((1, 8, 24, 48)), "temperature": 0, **more}


def _completion(prompts: Sequence[str], draw: random.Random) -> Asked:
    body = _body(draw, prompt=draw.choice(prompts))
    return Asked("greedy completion", COMPLETION, body, stream=draw.random() < 0.5)


def _seeded(prompts: Sequence[str], draw: random.Random) -> Asked:
    more = {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(3)}
    body = _body(draw, prompt=draw.choice(prompts)) | more
    return Asked("seeded completion", COMPLETION, body, stream=draw.random() < 0.5)


def _several(prompts: Sequence[str], draw: random.Random) -> Asked:
    some = draw.sample(prompts, 3)
    return Asked("three prompts in one", COMPLETION, _body(draw, prompt=some, logprobs=1))


def _choices(prompts: Sequence[str], draw: random.Random) -> Asked:
    body = _body(draw, prompt=draw.choice(prompts)) | {"temperature": 1.0, "seed": 4, "n": 3}
    return Asked("three choices", COMPLETION, body, stream=draw.random() < 0.5)


def _penalised(prompts: Sequence[str], draw: random.Random) -> Asked:
    more = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "stop": ["\n\n", "return"]}
    extra = {"repetition_penalty": 1.1, "min_tokens": 1, "top_k": 40}
    body = _body(draw, prompt=draw.choice(prompts), **more, extra_body=extra)
    return Asked("penalties and stop texts", COMPLETION, body)


def _messages(prompts: Sequence[str], draw: random.Random) -> list[dict[str, str]]:
    said = [{"role": "user", "content": draw.choice(prompts)}]
    if draw.random() < 0.5:
        said = [{"role": "system", "content": "Python code only."}, *said]
    return said


def _chat(prompts: Sequence[str], draw: random.Random) -> Asked:
    body = _body(draw, messages=_messages(prompts, draw))
    return Asked("chat", CHAT, body, stream=draw.random() < 0.5)


def _tools(prompts: Sequence[str], draw: random.Random) -> Asked:
    named = {"type": "function", "function": {"name": draw.choice(("read_file", "list_folder"))}}
    choice = draw.choice(("required", "auto", named))
    body = _body(draw, messages=_messages(prompts, draw), tools=TOOLS, tool_choice=choice)
    return Asked("tools", CHAT, body | {"max_tokens": 48}, stream=draw.random() < 0.5)


def _schema(prompts: Sequence[str], draw: random.Random) -> Asked:
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    body = _body(draw, messages=_messages(prompts, draw), response_format=form)
    return Asked("schema", CHAT, body | {"max_tokens": 48}, stream=draw.random() < 0.5)


def _typical(prompts: Sequence[str], draw: random.Random) -> Asked:
    extra = {"vllm_xargs": {"medusa": '{"acceptance": "typical", "epsilon": 0.2}'}}
    body = _body(draw, prompt=draw.choice(prompts), extra_body=extra) | {"temperature": 0.9}
    return Asked("typical acceptance", COMPLETION, body, compared=False)


def _cancelled(prompts: Sequence[str], draw: random.Random) -> Asked:
    body = _body(draw, prompt=draw.choice(prompts)) | {"max_tokens": 400}
    after = draw.choice((0, 1, 3, 9))
    return Asked("cancelled stream", COMPLETION, body, True, after, compared=False)


_WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": "warm"},
    {"max_tokens": 0},
    {"max_tokens": 10**6},
    {"top_p": 2},
    {"n": 0},
    {"logprobs": 10**4},
    {"model": "nobody"},
    {"prompt": "x " * 5000},
    {"prompt": [10**7]},
    {"temperature": 1, "extra_body": {"min_p": 0.2}},
    {"extra_body": {"vllm_xargs": {"medusa": "typcal"}}},
    {"extra_body": {"structured_outputs": {"regex": "(("}}},
    {"extra_body": {"structured_outputs": {"json": {"type": "nothing"}}}},
)


def _malformed(prompts: Sequence[str], draw: random.Random) -> Asked:
    body = _body(draw, prompt=draw.choice(prompts)) | draw.choice(_WRONG)
    return Asked("malformed", COMPLETION, body, compared=False, refused=True)


_Maker = Callable[[Sequence[str], random.Random], Asked]
_MAKERS: tuple[_Maker, ...] = (
    *(_completion, _completion, _seeded, _several, _choices, _penalised),
    *(_chat, _chat, _tools, _schema, _typical, _cancelled, _malformed),
)


async def ask(client: Any, asked: Asked, model: str) -> Answer:
    """Send a request with `openai.AsyncOpenAI`; an error of the server is an answer too."""
    from openai import APIStatusError

    call = client
    for name in asked.route.split("."):
        call = getattr(call, name)
    answer, body = Answer(), {"model": model, **asked.body}
    try:
        if not asked.stream:
            _take(answer, (await call.create(**body)).choices, "message")
            return answer
        async with await call.create(**body, stream=True) as stream:
            number = 0
            async for chunk in stream:
                if number == asked.cancel_after:
                    answer.cancelled = True
                    return answer
                number += 1
                _take(answer, chunk.choices, "delta")
    except APIStatusError as error:
        answer.error = error.status_code, type(error).__name__
    return answer


def _take(answer: Answer, choices: Sequence[Any], part: str) -> None:
    for choice in choices:
        said = getattr(choice, part, None)
        text = choice.text if said is None else said.content
        answer.texts[choice.index] = answer.texts.get(choice.index, "") + (text or "")
        if choice.finish_reason is not None:
            answer.reasons[choice.index] = choice.finish_reason
        for place, call in enumerate(getattr(said, "tool_calls", None) or ()):
            calls = answer.tools.setdefault(choice.index, [])
            at = getattr(call, "index", None)
            at = place if at is None else at
            calls += [["", ""] for _ in range(at + 1 - len(calls))]
            calls[at][0] += call.function.name or ""
            calls[at][1] += call.function.arguments or ""
