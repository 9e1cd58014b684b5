r"""A server under thousands of mixed requests: checks for lost or wrong answers and leaks.

    make soak

Sixty-four concurrent clients of the official `openai` package send requests to a server with heads:
completions, chats, streams, tools, schemas, several choices, penalties and stop strings. Some
disconnect during a stream, some send invalid requests. Requests with a fixed answer (temperature 0,
seeds) are first sent to a plain server. Leaks are detected by the growth of the private memory of
the server and engine processes during the second half of the requests.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil

from benchmarks.case import ROOT, Case, Row
from benchmarks.compare import arm_of
from benchmarks.engines import PLAIN, EngineOptions
from benchmarks.serve import server
from benchmarks.soak_requests import Answer, Request, ask, requests
from vllm_medusa.job import Progress
from vllm_medusa.options import Above, FromZero, Positive, Seed, option

MODEL = "target"
_REFUSALS = range(400, 500)
_SAMPLE_S = 0.5  # between memory samples
_SETTLE_S = 30.0  # for the last requests to leave the engine
_LOST_S = 300.0  # a request that takes longer is lost


class SoakOptions(EngineOptions):
    """Options of the benchmark."""

    requests: Positive = option(default=2000)
    clients: Positive = option("concurrent clients", default=64)
    distinct: Positive = option("distinct requests; the others repeat them", default=400)
    seed: Seed = option(default=0)
    prompts: Positive = option("max prompts per file", default=32)
    batch: tuple[Positive, ...] = option("max concurrent requests of the server", default=(32,))
    cache_mib: Positive = option("size of the KV cache; a small one causes preemption", default=96)
    budget: FromZero = option("draft nodes per tree; 0: automatic", default=0)
    max_growth: Above = option("max MiB per 1,000 requests, for each process", default=8.0)
    max_model_len: Positive = option(default=1024)


@dataclass
class Seen:
    """A process's private memory, in MiB, by the number of finished requests."""

    name: str
    process: psutil.Process
    points: list[tuple[int, float]] = field(default_factory=list)

    def look(self, done: int) -> None:
        """Record a sample."""
        self.points.append((done, self.process.memory_full_info().uss / 2**20))

    def slope(self) -> float:
        """MiB per 1,000 requests, over the second half of them."""
        done, mib = np.array(self.points).T
        half = done >= done[-1] / 2
        return 1000 * float(np.polyfit(done[half], mib[half], 1)[0])


def run(options: SoakOptions, progress: Progress) -> Iterator[Row]:
    """A row for each kind of request and each process of the server."""
    options = options.ready(progress)
    prompts = [prompt.text or prompt.turns[0] for prompt in options.all_prompts()]
    pool = requests(prompts, options.distinct, options.seed)
    planned = [pool[index % len(pool)] for index in range(options.requests)]
    known = list({each.key: each for each in pool if each.compared}.values())
    progress.note(f"{len(known)} answers of plain vLLM")
    with server(PLAIN, options, more=server_options(options)) as url:
        plain, _ = asyncio.run(ask_all(url, known, options.clients))
    wanted = {each.key: asdict(found) for each, found in zip(known, plain, strict=True)}
    form = "dynamic" if options.budget else "automatic"
    arm = arm_of(options.drafter, form, options.budget)
    assert arm is not None  # every drafter supports these forms
    progress.note(f"{len(planned)} requests")
    with server(arm, options, more=server_options(options)) as url:
        processes = processes_of(url)
        start = time.monotonic()
        answers, at_most = asyncio.run(ask_all(url, planned, options.clients, processes))
        seconds = time.monotonic() - start
        left = settled(url)
        preempted = metric(url, "num_preemptions_total")
        accepted = metric(url, "spec_decode_num_accepted_tokens_total")
        drafts = metric(url, "spec_decode_num_drafts_total")
    what = {"name": "all requests", "requests": len(planned)}
    numbers = {"seconds": seconds, "preempted": preempted, "at_most": at_most}
    numbers["tau"] = 1 + accepted / max(drafts, 1)
    lost = sum(isinstance(answer, str) for answer in answers)
    yield Row(what, numbers, right=not lost and not left, failed=_lost(lost, left, answers))
    for kind in dict.fromkeys(each.kind for each in planned):
        own = [(a, b) for a, b in zip(planned, answers, strict=True) if a.kind == kind]
        wrong = [problem for a, b in own if (problem := problem_of(a, b, wanted))]
        reason = f"{len(wrong)} of {len(own)}: {wrong[0]}" if wrong else ""
        numbers = {"compared": sum(each.compared for each, _ in own)}
        numbers["cancelled"] = sum(isinstance(b, Answer) and b.cancelled for _, b in own)
        numbers["refused"] = sum(isinstance(b, Answer) and b.error is not None for _, b in own)
        yield Row({"name": kind, "requests": len(own)}, numbers, right=not wrong, failed=reason)
    for each in processes:
        mib = [value for _, value in each.points]
        numbers = {"first": mib[0], "last": mib[-1], "slope": each.slope()}
        grown = numbers["slope"] > options.max_growth
        reason = f"it grows by {numbers['slope']:.1f} MiB per 1,000 requests" if grown else ""
        yield Row({"name": each.name}, numbers, right=not grown, failed=reason)


def server_options(options: SoakOptions) -> dict[str, Any]:
    """Options of both servers beyond an arm's settings."""
    return {
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": options.cache_mib << 20,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "chat_template": str(ROOT / "examples" / "plain_chat_template.jinja"),
    }


async def ask_all(
    url: str, planned: Sequence[Request], clients: int, processes: Sequence[Seen] = ()
) -> tuple[list[Any], int]:
    """Send all requests, ``clients`` at a time; a lost one has its error as the answer.

    Returns the answers in the order of the requests, and the max number of concurrent requests.
    """
    from openai import AsyncOpenAI

    found: list[Any] = [None] * len(planned)
    waiting, state = iter(enumerate(planned)), {"done": 0, "now": 0, "max": 0}
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_LOST_S
    ) as client:

        async def work() -> None:
            for index, each in waiting:
                state["now"] += 1
                state["max"] = max(state["max"], state["now"])
                try:
                    found[index] = await asyncio.wait_for(ask(client, each, MODEL), _LOST_S)
                except Exception as error:
                    found[index] = f"{type(error).__name__}: {error}"
                state["now"] -= 1
                state["done"] += 1

        async def watch() -> None:
            while True:
                for each in processes:
                    each.look(state["done"])
                await asyncio.sleep(_SAMPLE_S)

        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(work() for _ in range(clients)))
        finally:
            watching.cancel()
    return found, state["max"]


def problem_of(planned: Request, answer: Any, wanted: dict[str, dict[str, Any]]) -> str:
    """Describe an error of an answer; empty if it is correct."""
    if isinstance(answer, str):
        return f"lost: {answer}"
    if planned.refused:
        status = answer.error[0] if answer.error else 200
        return "" if status in _REFUSALS else f"{dict(planned.body)} got the status {status}"
    if planned.compared:
        got, plain = asdict(answer), wanted[planned.key]
        return "" if got == plain else f"{planned.key[:300]}: {got}, plain {plain}"
    if answer.error:
        return f"{planned.key[:300]}: {answer.error}"
    return "" if answer.cancelled or None not in answer.reasons.values() else "no finish reason"


def _lost(lost: int, left: float, answers: Sequence[Any]) -> str:
    if lost:
        first = next(answer for answer in answers if isinstance(answer, str))
        return f"{lost} requests were lost, the first with {first}"
    return f"{left:.0f} requests are still running or waiting in the engine" if left else ""


def settled(url: str) -> float:
    """Number of requests left in the engine after at most `_SETTLE_S` seconds."""
    end, left = time.monotonic() + _SETTLE_S, 1.0
    while left and time.monotonic() < end:
        time.sleep(1)
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
        left = sum(metric(url, f"num_requests_{state}") for state in ("running", "waiting"))
    return left


def metric(url: str, name: str) -> float:
    """The sum of a metric of the server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def processes_of(url: str) -> list[Seen]:
    """The server's process and its engine's, found by port."""
    port = int(url.rpartition(":")[2])
    parent = next(
        process
        for process in psutil.Process().children(recursive=True)
        if any(c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections())
    )
    engine = max(parent.children(recursive=True), key=lambda child: child.memory_info().rss)
    return [Seen("the server's process", parent), Seen("the engine's process", engine)]


CASE = Case(
    SoakOptions,
    run,
    {
        "name": ("what", ""),
        "requests": ("requests", "d"),
        "compared": ("equal to plain vLLM", "d"),
        "cancelled": ("cancelled", "d"),
        "refused": ("refused", "d"),
        "seconds": ("seconds", ".0f"),
        "at_most": ("concurrent", "d"),
        "preempted": ("preemptions", ".0f"),
        "tau": ("tau", ".2f"),
        "first": ("MiB at start", ".0f"),
        "last": ("MiB at end", ".0f"),
        "slope": ("MiB per 1,000 requests", ".2f"),
    },
    quick={"requests": 130, "distinct": 65, "max_growth": 1000.0},
)
