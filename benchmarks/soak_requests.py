"""Requests of all kinds for a server, generated from a seed, and their answers.

An answer is recorded so that two servers can be compared: the status and type of an error, or for
each choice the text or tool calls and the finish reason.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
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
class Request:
    """A request."""

    kind: str
    route: str  # of the client: `CHAT` or `COMPLETION`
    body: Mapping[str, Any]
    stream: bool = False
    cancel_after: int | None = None  # disconnect after this number of chunks
    compared: bool = True  # its answer must equal plain vLLM's
    refused: bool = False  # the answer must be a client error: 400, 404 or 422

    @property
    def key(self) -> str:
        """Equal for requests with equal answers."""
        return json.dumps([self.route, self.body], sort_keys=True)


@dataclass
class Answer:
    """The response to a client."""

    error: tuple[int, str] | None = None  # status and type
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    reasons: dict[int, str | None] = field(default_factory=dict)
    tools: dict[int, list[list[str]]] = field(default_factory=dict)  # names and arguments
    cancelled: bool = False


# Requests that must be refused: these values replace those of a valid request.
WRONG: tuple[dict[str, Any], ...] = (
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
KINDS = {  # kind -> relative frequency
    "greedy completion": 2,
    "seeded completion": 1,
    "three prompts in one": 1,
    "three choices": 1,
    "penalties and stop strings": 1,
    "chat": 2,
    "tools": 1,
    "schema": 1,
    "typical acceptance": 1,
    "cancelled stream": 1,
    "malformed": 1,
}


def requests(prompts: Sequence[str], count: int, seed: int) -> list[Request]:
    """``count`` requests of all kinds, some of them equal."""
    draw = random.Random(seed)
    kinds = draw.choices(list(KINDS), list(KINDS.values()), k=count)
    return [_request(kind, prompts, draw) for kind in kinds]


def _request(kind: str, prompts: Sequence[str], draw: random.Random) -> Request:
    prompt, stream = draw.choice(prompts), draw.random() < 0.5
    route, more = COMPLETION, dict[str, Any]()
    body: dict[str, Any] = {"max_tokens": draw.choice((1, 8, 24, 48)), "temperature": 0}
    if kind in ("chat", "tools", "schema"):
        route = CHAT
        system = [{"role": "system", "content": "Python code only."}] * (draw.random() < 0.5)
        body["messages"] = [*system, {"role": "user", "content": prompt}]
        body["max_tokens"] = body["max_tokens"] if kind == "chat" else 48
    else:
        body["prompt"] = prompt
    match kind:
        case "seeded completion":
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(3)}
        case "three prompts in one":
            body |= {"prompt": draw.sample(prompts, 3), "logprobs": 1}
            stream = False
        case "three choices":
            body |= {"temperature": 1.0, "seed": 4, "n": 3}
        case "penalties and stop strings":
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "stop": ["\n\n", "return"]}
            body["extra_body"] = {"repetition_penalty": 1.1, "min_tokens": 1, "top_k": 40}
        case "tools":
            name = draw.choice(("read_file", "list_folder"))
            named = {"type": "function", "function": {"name": name}}
            body |= {"tools": TOOLS, "tool_choice": draw.choice(("required", "auto", named))}
        case "schema":
            schema = {"name": "found", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case "typical acceptance":
            rule = '{"acceptance": "typical", "epsilon": 0.2}'
            body |= {"temperature": 0.9, "extra_body": {"vllm_xargs": {"medusa": rule}}}
            more["compared"] = False
        case "cancelled stream":
            body["max_tokens"], stream = 400, True
            more = {"cancel_after": draw.choice((0, 1, 3, 9)), "compared": False}
        case "malformed":
            body |= draw.choice(WRONG)
            more, stream = {"compared": False, "refused": True}, False
    return Request(kind, route, body, stream, **more)


async def ask(client: Any, request: Request, model: str) -> Answer:
    """Send a request with `openai.AsyncOpenAI`; a server error is an answer too."""
    from openai import APIStatusError

    call = client
    for name in request.route.split("."):
        call = getattr(call, name)
    answer, body = Answer(), {"model": model, **request.body}
    try:
        if not request.stream:
            _take(answer, (await call.create(**body)).choices, "message")
            return answer
        async with await call.create(**body, stream=True) as stream:
            number = 0
            async for chunk in stream:
                if number == request.cancel_after:
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
