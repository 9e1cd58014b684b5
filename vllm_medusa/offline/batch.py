"""Run prompts through an engine and yield each result when it is finished.

At most ``concurrency`` prompts are in the engine at a time; a conversation keeps its place until
its last turn is answered. Results are in order of completion. A session decides what is requested
for a prompt: `Conversation` requests one answer to each turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_medusa.offline.prompts import Message, Prompt


class AcceptanceCounts(Counter[int]):
    """Acceptance of one request or several: number of verification steps by accepted tokens.

    The first step of a request is its prefill: it yields one token and verifies nothing. Every
    later step verifies one tree and yields the accepted draft tokens followed by one token of the
    target. A step truncated by a stop token or the token limit counts only its delivered tokens.
    """

    @classmethod
    def of(cls, delivered: Sequence[int]) -> AcceptanceCounts:
        """From the token counts of a request's non-empty steps, prefill first."""
        if any(tokens < 1 for tokens in delivered):
            raise ValueError(f"every step must deliver a token; received {list(delivered)}")
        return cls(tokens - 1 for tokens in delivered[1:])

    @classmethod
    def summed(cls, parts: Iterable[AcceptanceCounts]) -> AcceptanceCounts:
        """Sum of several requests."""
        found = cls()
        for part in parts:
            found.update(part)
        return found

    @property
    def histogram(self) -> list[int]:
        """Number of verification steps that accepted ``a`` draft tokens, at index ``a``."""
        return [self[a] for a in range(max(self, default=-1) + 1)]

    @property
    def steps(self) -> int:
        """Number of verification steps."""
        return self.total()

    @property
    def accepted(self) -> int:
        """Accepted and delivered draft tokens."""
        return sum(a * steps for a, steps in self.items())

    @property
    def tau(self) -> float | None:
        """Tokens per verification step; None without any."""
        return 1 + self.accepted / self.steps if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """Part of a line of the result file, plain JSON."""
        return {
            "steps": self.steps,
            "accepted_draft_tokens": self.accepted,
            "tokens_per_step": self.tau,
            "histogram": self.histogram,
        }


class RequestRefused(ValueError):
    """The engine refuses one prompt, for example because it is too long."""


@dataclass(frozen=True)
class Delta:
    """New tokens of one request from one engine step; empty only if the request finished."""

    key: str
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: Sequence[int] = ()  # of the whole request, if the engine provides them


class Engine(Protocol):
    """An engine for `run_batch`; it raises `RequestRefused` for prompts that it can't run."""

    def submit(
        self,
        key: str,  # identifies the request in the output of ``step``
        prompt: str | list[int],  # text, or token ids
        seed: int | None,  # of the request; None for the engine's random state
        options: Mapping[str, Any],  # sampling parameters that override the engine's
    ) -> None:
        """Queue a request."""

    def step(self) -> list[Delta]:
        """Run one engine step for the queued requests and return its output."""

    def render(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to the model's next answer."""


@dataclass
class Answer:
    """A generated text in progress; ``role`` is its speaker in a conversation."""

    role: str = "assistant"
    prompt_token_ids: Sequence[int] = ()
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)  # tokens of each engine step
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append the tokens of one step."""
        self.prompt_token_ids = delta.prompt_token_ids
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.token_ids:
            self.delivered.append(len(delta.token_ids))
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def to_dict(self) -> dict[str, Any]:
        """Part of a line of the result file, plain JSON."""
        names = ("text", "token_ids", "finish_reason", "stop_reason")
        own = {name: getattr(self, name) for name in names}
        return own | {"acceptance": AcceptanceCounts.of(self.delivered).to_dict()}


@dataclass(frozen=True)
class Result:
    """A finished prompt: one answer, or one per turn until a turn was refused."""

    prompt: Prompt
    answers: tuple[Answer, ...]
    error: str | None = None

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Acceptance over all turns."""
        return AcceptanceCounts.summed(AcceptanceCounts.of(a.delivered) for a in self.answers)

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all turns."""
        return sum(len(a.token_ids) for a in self.answers)

    def to_dict(self) -> dict[str, Any]:
        """One line of the result file, plain JSON.

        ``text``, ``token_ids`` and the reasons are those of the last turn; ``turns`` lists all of
        them and is present only if the prompt has several.
        """
        record: dict[str, Any] = {"index": self.prompt.index, "request_id": self.prompt.request_id}
        turns = [answer.to_dict() for answer in self.answers]
        if self.error is not None:
            return record | {"error": self.error} | ({"turns": turns} if turns else {})
        record |= turns[-1] | {"acceptance": self.acceptance.to_dict()}
        return record | ({"turns": turns} if len(turns) > 1 else {})


@dataclass(frozen=True)
class Request:
    """A session's next request; ``options`` are its own sampling parameters."""

    prompt: str | list[int]
    options: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """A prompt in the engine: its answers and its next request."""

    prompt: Prompt
    answers: list[Answer]

    def next_request(self, engine: Engine) -> Request:
        """The next request; appends the `Answer` for its tokens."""

    @property
    def finished(self) -> bool:
        """Whether the last answer, which is complete, was the final one."""


@dataclass
class Conversation:
    """A completion, or an answer to each of the prompt's turns."""

    prompt: Prompt
    answers: list[Answer] = field(default_factory=list)
    messages: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.messages = list(self.prompt.history)

    def next_request(self, engine: Engine) -> Request:
        """See `Session`."""
        turn = len(self.answers)
        if self.answers:
            self.messages.append({"role": "assistant", "content": self.answers[-1].text})
        self.answers.append(Answer())
        if self.prompt.text is not None:
            return Request(self.prompt.text)
        if self.prompt.token_ids:
            return Request(list(self.prompt.token_ids))
        self.messages.append({"role": "user", "content": self.prompt.turns[turn]})
        return Request(engine.render(self.messages))

    @property
    def finished(self) -> bool:
        """See `Session`."""
        return len(self.answers) >= max(1, len(self.prompt.turns))


def run_batch(
    prompts: Iterable[Prompt],  # read lazily
    engine: Engine,  # it must have no unfinished requests
    *,
    concurrency: int,  # prompts in the engine at a time, at least 1
    seed: int | None = None,  # prompt ``index`` uses ``seed + index`` in all its turns
    session: Callable[[Prompt], Session] = Conversation,  # creates the session of a prompt
) -> Iterator[Result]:
    """Generate for every prompt; yields results in order of completion.

    A prompt that the engine refuses yields a result with ``error`` and the earlier answers.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; it must be at least 1.")
    waiting = iter(prompts)
    running: dict[str, Session] = {}

    def submit(key: str, state: Session) -> Result | None:
        prompt_seed = None if seed is None else seed + state.prompt.index
        try:
            request = state.next_request(engine)
            engine.submit(key, request.prompt, prompt_seed, request.options)
        except RequestRefused as error:
            return Result(state.prompt, tuple(state.answers[:-1]), error=str(error))
        running[key] = state
        return None

    while True:
        while len(running) < concurrency and (prompt := next(waiting, None)) is not None:
            if refused := submit(f"{prompt.index}.0", session(prompt)):
                yield refused
        if not running:
            return
        for delta in engine.step():
            state = running[delta.key]
            answer = state.answers[-1]
            answer.add(delta)
            if answer.finish_reason is None:
                continue
            del running[delta.key]
            if state.finished:
                yield Result(state.prompt, tuple(state.answers))
            elif refused := submit(f"{state.prompt.index}.{len(state.answers)}", state):
                yield refused
