"""Both engines on the demo's prompts: they start concurrently and then take turns.

Start-up is mostly compilation, which keeps one core busy. An engine without requests is idle, so
each engine is measured alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from demo.recording import Run, Step, Take
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Answer, Conversation, Delta, Engine, Request
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt

_SEED = 20_000
_WARM_UP = 16  # tokens at each temperature


@dataclass
class TimedAnswer(Answer):
    """An answer that records when each of its steps ended."""

    began: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)  # seconds since it began

    def add(self, delta: Delta) -> None:
        """Append the tokens of one step."""
        super().add(delta)
        if delta.token_ids:
            self.times.append(time.perf_counter() - self.began)


class TimedConversation(Conversation):
    """A conversation whose answers are `TimedAnswer`s."""

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        answer = TimedAnswer()
        request = super().next_request(engine)
        self.answers[-1] = answer
        return request


class Start(Thread):
    """Starts an engine in the background; ``engine`` has it, or the error."""

    def __init__(self, arguments: Mapping[str, Any], sampling: Sampling) -> None:
        super().__init__(daemon=True)
        self._given = arguments, sampling
        self.engine: Future[EngineProcess] = Future()
        self.start()

    def run(self) -> None:
        """Start the engine, then wait: if this thread ended, the child process would end too."""
        try:
            self.engine.set_result(EngineProcess(*self._given))
        except Exception as error:
            self.engine.set_exception(error)
        Event().wait()


def record(
    target: Path,  # a folder
    speculation: Mapping[str, Any],  # the `speculative_config` of the engine with drafts
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    max_tokens: int,
    engine_args: Mapping[str, Any],  # of both engines
    progress: Progress,
) -> tuple[Run, ...]:
    """Run all prompts through both engines, one at a time, at each temperature.

    Raises EngineRefused, JobFailed: an engine failed to start; ValueError: a prompt was refused.
    """
    from transformers import AutoTokenizer

    plain = {"model": str(target), "dtype": "float32", **engine_args}
    drafted = plain | {"speculative_config": dict(speculation)}
    settings = {"plain vLLM": plain, "with drafts": drafted}
    samplings = [Sampling(max_tokens=max_tokens, temperature=t) for t in temperatures]
    progress.note("both engines start concurrently (two idle cores: two minutes), then take turns")
    highest = max(samplings, key=lambda sampling: sampling.temperature)
    starts = {name: Start(each, highest).engine for name, each in settings.items()}
    _wait(list(starts.values()), progress)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(start.result()) for name, start in starts.items()}
        answers = _answers(engines, prompts, samplings, progress)
    tokenizer = AutoTokenizer.from_pretrained(target)
    return tuple(
        Run(
            prompt.request_id,
            prompt.turns[0] if prompt.turns else prompt.text or "",
            temperature,
            take(answers["plain vLLM", temperature, prompt.index], tokenizer),
            take(answers["with drafts", temperature, prompt.index], tokenizer),
        )
        for temperature in temperatures
        for prompt in prompts
    )


def _wait(starts: Sequence[Future[EngineProcess]], progress: Progress) -> None:
    """Wait for all; raises the error of one without waiting for the others."""
    what, seconds = "both engines load and compile", 0
    while True:
        done, waiting = wait(starts, timeout=1.0, return_when=FIRST_EXCEPTION)
        for start in done:
            start.result()
        if not waiting:
            progress.at(what, seconds, seconds)
            return
        seconds += 1
        progress.at(what, seconds, None, "s")


def _answers(
    engines: Mapping[str, EngineProcess],
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    progress: Progress,
) -> dict[tuple[str, float, int], TimedAnswer]:
    """Each engine's answers; the engines take turns, so that other load affects both."""
    answers = dict[tuple[str, float, int], TimedAnswer]()
    for engine in engines.values():
        engine.session = TimedConversation
        for sampling in samplings:
            engine.sampling = replace(sampling, max_tokens=_WARM_UP)
            engine.run(prompts[:1], 1, _SEED)
    for sampling in samplings:
        for done, prompt in enumerate(prompts, start=1):
            for name, engine in engines.items():
                engine.sampling = sampling
                (result,), _ = engine.run([prompt], 1, _SEED)
                if result.error is not None:
                    raise ValueError(f"prompt {prompt.request_id} was refused: {result.error}")
                answer = result.answers[0]
                assert isinstance(answer, TimedAnswer)
                answers[name, sampling.temperature, prompt.index] = answer
            progress.at(f"T {sampling.temperature:g}, prompts", done, len(prompts))
    return answers


def take(answer: TimedAnswer, tokenizer: Any) -> Take:
    """Convert an answer for the recording."""
    texts = iter(pieces(answer.token_ids, tokenizer))
    steps = tuple(
        Step(round(at, 4), tuple(next(texts) for _ in range(count)))
        for at, count in zip(answer.times, answer.delivered, strict=True)
    )
    return Take(steps, tuple(answer.token_ids), answer.finish_reason)


def pieces(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to the last of them."""
    found, done = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            text = done  # the middle of a character
        found.append(text[len(done) :])
        done = text
    return found
