"""An engine without a model: tokens are a fixed function of the prompt, the seed and the position.

Speculation is imitated by returning several tokens per step; the tokens themselves do not depend on
it, as in a lossless engine.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_medusa.offline.batch import Conversation, Delta, RequestRefused, Result, run_batch
from vllm_medusa.offline.prompts import Message


@dataclass
class FakeEngine:
    max_tokens: int = 8
    step_sizes: tuple[int, ...] = (1,)  # tokens per step after a request's first, in turn
    longest_prompt: int = 10_000
    step_seconds: float = 0.0
    chat: bool = False
    wrong_at: int | None = None  # position of a wrong token in every request
    prompts: dict[str, str | list[int]] = field(default_factory=dict)  # all submitted prompts
    seeds: dict[str, int | None] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    active: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    most_active: int = 0

    def submit(
        self, key: str, prompt: str | list[int], seed: int | None, options: Mapping[str, Any]
    ) -> None:
        if len(prompt) > self.longest_prompt:
            raise RequestRefused(f"the prompt has {len(prompt)} tokens")
        assert key not in self.prompts, "a request was submitted twice"
        self.prompts[key] = prompt
        self.seeds[key] = seed
        self.options[key] = dict(options)
        digest = hashlib.sha256(repr((prompt, seed)).encode()).digest()
        tokens = [digest[i % 32] for i in range(1 + digest[0] % self.max_tokens)]
        if self.wrong_at is not None and self.wrong_at < len(tokens):
            tokens[self.wrong_at] += 1000
        self.active[key], self.done[key], self.steps[key] = tokens, 0, 0
        self.most_active = max(self.most_active, len(self.active))

    def step(self) -> list[Delta]:
        time.sleep(self.step_seconds)
        deltas = []
        for key, tokens in list(self.active.items()):
            sizes = self.step_sizes
            size = 1 if self.steps[key] == 0 else sizes[(self.steps[key] - 1) % len(sizes)]
            new = tokens[self.done[key] : self.done[key] + size]
            self.done[key] += len(new)
            self.steps[key] += 1
            finished = self.done[key] == len(tokens)
            if finished:
                del self.active[key]
            text = "".join(f"{t}," for t in new)
            prompt = self.prompts.get(key, [])
            ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
            reason = "length" if finished else None
            deltas.append(Delta(key, text, new, reason, prompt_token_ids=ids))
        return deltas

    def render(self, messages: list[Message]) -> list[int]:
        role = "[{}]" if self.chat else ""
        return list("".join(role.format(m["role"]) + m["content"] for m in messages).encode())


class FakeProcess(FakeEngine):
    """Replaces `EngineProcess`; a group takes one second."""

    session: Any = Conversation
    dtype = "float32"

    def stream(self, prompts: Any, concurrency: int, seed: int | None) -> Iterator[Result]:
        self.prompts.clear()  # rounds reuse keys
        how: dict[str, Any] = {"concurrency": concurrency, "seed": seed, "session": self.session}
        yield from run_batch(prompts, self, **how)

    def run(self, prompts: Any, concurrency: int, seed: int | None) -> tuple[list[Result], float]:
        return list(self.stream(prompts, concurrency, seed)), 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
