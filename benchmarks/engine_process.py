"""One arm's engine in a process of its own: JSON lines in on stdin, JSON lines out on stdout.

Started by `benchmarks.arms`, which sets the environment that must be there before the process is
(OpenMP, plugins). Whatever vLLM prints goes to stderr, so stdout carries replies only:

    {"op": "run", "prompts": [[id, ...], ...], "temperature": 0.8, "max_tokens": 96, "batch": 1}
    {"op": "profile", ...}                         the same, with the parts of every step
    {"op": "score", "rows": [[id, ...], ...]}      logprob of each row's last id, given the others
    {"op": "info"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from vllm import LLM, SamplingParams


class Engine:
    """A vLLM engine whose steps are driven, and timed, one by one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        started = time.perf_counter()
        self.llm = LLM(**settings)
        self.startup_seconds = time.perf_counter() - started
        self.requests = 0
        self.spans: Any = None

    def info(self) -> dict[str, Any]:
        """Start-up time, memory and the number of threads."""
        import psutil
        import torch

        process = psutil.Process()
        family = [process, *process.children(recursive=True)]
        return {
            "startup_seconds": self.startup_seconds,
            "resident_mb": sum(member.memory_info().rss for member in family) / 1e6,
            "torch_threads": torch.get_num_threads(),
        }

    def run(
        self, prompts: list[list[int]], temperature: float, max_tokens: int, batch: int
    ) -> dict[str, Any]:
        """Generates for all prompts, `batch` of them at a time; prompt i has seed i.

        Returns:
            `outputs`: the new ids of each prompt. `steps`: for every engine step `[seconds, new
            tokens, requests that got some, whether one of them got its first]`.

        """
        outputs: list[list[int]] = []
        steps: list[list[Any]] = []
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            outputs += self._run_group(group, first, temperature, max_tokens, steps)
        return {"outputs": outputs, "steps": steps}

    def profile(self, **arguments: Any) -> dict[str, Any]:
        """As `run`; every step also has the exclusive seconds of its parts."""
        from benchmarks.spans import hook_engine

        self.spans = self.spans or hook_engine(self.llm)
        return self.run(**arguments)

    def _run_group(
        self,
        prompts: list[list[int]],
        first_seed: int,
        temperature: float,
        max_tokens: int,
        steps: list[list[Any]],
    ) -> list[list[int]]:
        engine = self.llm.llm_engine
        names = []
        for offset, ids in enumerate(prompts):
            seed = first_seed + offset if temperature > 0 else None
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
            names.append(str(self.requests))
            engine.add_request(names[-1], {"prompt_token_ids": ids}, params)
            self.requests += 1
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            results = engine.step()
            seconds = time.perf_counter() - started
            new, emitting, fresh = 0, 0, False
            for result in results:
                ids = list(result.outputs[0].token_ids)
                gained = len(ids) - len(tokens[result.request_id])
                fresh |= gained > 0 and not tokens[result.request_id]
                new += gained
                emitting += gained > 0
                tokens[result.request_id] = ids
            steps.append([seconds, new, emitting, fresh])
            if self.spans is not None:
                steps[-1].append(self.spans.take())
        return list(tokens.values())

    def score(self, rows: list[list[int]]) -> list[float]:
        """The target's log-probability, at temperature 1, of each row's last id."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": row} for row in rows]
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            r.prompt_logprobs[-1][row[-1]].logprob for r, row in zip(results, rows, strict=True)
        ]


def serve(commands: TextIO, replies: TextIO) -> None:
    """Answers commands until the input ends; the first line holds the engine's settings."""
    engine = Engine(json.loads(commands.readline()))
    operations: dict[str, Callable[..., Any]] = {
        "run": engine.run,
        "profile": engine.profile,
        "score": engine.score,
        "info": engine.info,
    }
    reply: Any = engine.info()
    while True:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        line = commands.readline()
        if not line:
            return
        command = json.loads(line)
        reply = operations[command.pop("op")](**command)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its children print to stdout
    serve(sys.stdin, channel)
