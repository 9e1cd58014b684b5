"""A server under open load: plain vLLM, the automatic budget and fixed-size trees, alternating.

    python -m benchmarks serve --rates 0.5 1 2

Requests arrive as a Poisson process at given rates, from near idle to above plain vLLM's capacity,
and in a ramp up and down, independently of answers. All servers are running, but only one at a time
is under load, with the same prompts, seeds and arrivals: A B C A, then in reverse. Plain vLLM has
two rows; their difference shows the noise. Requests are sent and timed by vLLM's own `vllm bench
serve`. In float32 answers must equal plain vLLM's; in other dtypes, where near-ties depend on the
other requests of a step, different answers are counted, including those of plain vLLM's second row.

TTFT is the time to the first token. TPOT is a request's time after it, divided by the number of
remaining tokens. Tokens accepted together arrive together; ITL is the time between two such
arrivals. Ratios compare each request with the same one in plain vLLM: its TTFT, and its tokens per
second from arrival to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import random
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Plot, Row
from benchmarks.compare import arm_of, labels
from benchmarks.engines import PLAIN, SEED, Arm, EngineOptions, environment, settings
from demo import packed
from vllm_medusa.job import JobFailed, Progress
from vllm_medusa.offline.children import Channel, Child, end_of
from vllm_medusa.options import Above, AtLeastZero, Positive, option

AGAIN = "plain, again"
_HOST, _MODEL = "127.0.0.1", "target"
_START_S, _DRAIN = 240.0, 8.0  # time limit of a load, as a multiple of its arrivals' seconds


class ServeOptions(EngineOptions):
    """Options of the benchmark."""

    batch: tuple[Positive, ...] = option("max concurrent requests of a server", default=(16,))
    others: tuple[Path, ...] = option("further heads or drafters", default=(), metavar="FOLDER")
    max_tokens: Positive = option("max tokens per answer", default=64)
    rates: tuple[Above, ...] = option("requests per second", default=(0.5, 1.0, 2.0, 4.0))
    ramp: AtLeastZero = option("rate at the top of the ramp; 0: none", default=4.0)
    requests: Positive = option("mean number of requests per rate and round", default=50)
    rounds: Positive = option("rounds over all servers, each with different arrivals", default=2)
    nodes: tuple[Positive, ...] = option("draft nodes of fixed-size trees", default=(4,))


@dataclass(frozen=True)
class Load:
    """An arrival process of requests."""

    name: str
    max_rate: float  # requests per second
    seconds: float
    ramp: bool = False  # up to ``max_rate`` in the middle, then down again

    def arrivals(self, seed: int) -> list[float]:
        """Arrival times in seconds of a Poisson process, by thinning; at least one."""
        draw, now, found = random.Random(f"{self.name} {seed}"), 0.0, list[float]()
        while now < self.seconds or not found:
            now += draw.expovariate(self.max_rate)
            share = 1 - abs(2 * now / self.seconds - 1) if self.ramp else 1.0
            if draw.random() < share and (now < self.seconds or not found):
                found.append(now % self.seconds)
        return found


@dataclass
class Answers:
    """Measurements of one server under one load, over all rounds."""

    ttfts: list[float] = field(default_factory=list)  # seconds
    token_times: list[float] = field(default_factory=list)  # seconds per token after the first
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens per second of each request
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0

    def add(self, found: dict[str, Any]) -> None:
        """Add the results of `vllm bench serve` for a round."""
        each = [*zip(found["latencies"], found["ttfts"], found["output_lens"], strict=True)]
        self.token_times += [(end - first) / (n - 1) for end, first, n in each if n > 1]
        self.speeds += [n / end if end else 0.0 for end, _, n in each]
        self.ttfts += found["ttfts"]
        self.gaps += [gap for gaps in found["itls"] for gap in gaps]
        self.texts += found["generated_texts"]
        self.tokens += sum(found["output_lens"])
        self.seconds += found["duration"]
        self.failed += sum(map(bool, found["errors"]))

    def figures(self, plain: Answers) -> dict[str, Any]:
        """Milliseconds, tokens per second, and ratios to the same requests in plain vLLM."""
        found: dict[str, Any] = {"requests": len(self.texts)}
        found["tokens_per_second"] = self.tokens / self.seconds
        for name, seconds in (
            ("ttft", self.ttfts),
            ("token", self.token_times),
            ("gap", self.gaps),
        ):
            for percent in (50, 99):
                found[f"{name}_p{percent}"] = 1e3 * float(np.percentile(seconds or [0], percent))
        for name, own, base in (
            ("ttft_ratio", self.ttfts, plain.ttfts),
            ("speed_ratio", self.speeds, plain.speeds),
        ):
            low, median, high = np.percentile(np.divide(own, base), [25, 50, 75]).tolist()
            found |= {name: median, f"{name}_quartiles": [low, high]}
        return found


def loads(options: ServeOptions) -> list[Load]:
    """The rates, then the ramp."""
    found = [Load(f"{rate:g}/s", rate, options.requests / rate) for rate in options.rates]
    if options.ramp:
        name = f"ramp to {options.ramp:g}/s"
        found.append(Load(name, options.ramp, 2 * options.requests / options.ramp, ramp=True))
    return found


def run(options: ServeOptions, progress: Progress) -> Iterator[Row]:
    """A row for each load and server, after all rounds of the load."""
    options = options.ready(progress)
    assert options.target is not None
    folders = [options.drafter, *(packed.usable(each, options.target) for each in options.others)]
    sizes = [("automatic", 0), *(("dynamic", nodes) for nodes in options.nodes)]
    drafting = [
        arm_of(folder, form, size, label=label)
        for folder, label in zip(folders, labels(folders), strict=True)
        for form, size in sizes
    ]
    chosen = options.chosen([PLAIN, *(arm for arm in drafting if arm)])
    arms = [PLAIN, *(arm for arm in chosen if arm is not PLAIN)]
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        for arm in arms:
            progress.note(f"{arm.name}: starting the server")
            try:
                urls[arm.name] = stack.enter_context(server(arm, options))
            except JobFailed as error:
                if arm is PLAIN:
                    raise
                yield Row({"name": arm.name, "arm": arm.name}, failed=str(error))
        middle = sorted(options.rates)[len(options.rates) // 2]
        for temperature in options.temperatures:
            warm_up = Load("warm-up", middle, 0.5 * options.requests / middle)
            for url in urls.values():
                ask(url, requests(warm_up, 0, temperature, options), warm_up.seconds)
            for load in loads(options):
                progress.note(f"{load.name}, T {temperature:g}")
                yield from _rows(urls, load, temperature, options)


def _rows(
    urls: dict[str, str], load: Load, temperature: float, options: ServeOptions
) -> Iterator[Row]:
    turns = [*urls, AGAIN]
    found = {name: Answers() for name in turns}
    broken: dict[str, str] = {}
    for number in range(options.rounds):
        planned = requests(load, number, temperature, options)
        for name in turns if number % 2 == 0 else reversed(turns):
            if name in broken:
                continue
            try:
                found[name].add(ask(urls.get(name, urls[PLAIN.name]), planned, load.seconds))
            except Exception as error:
                broken[name] = f"{type(error).__name__}: {error}"
    plain = found[PLAIN.name]
    for name, answers in found.items():
        what = {"name": f"{name}, {load.name}, T {temperature:g}", "temperature": temperature}
        what |= {"load": load.name, "rate": None if load.ramp else load.max_rate, "arm": name}
        reason = broken.get(name) or broken.get(PLAIN.name, "")
        numbers: dict[str, Any] = {}
        if not reason and answers.failed:
            reason = f"{answers.failed} of {len(plain.texts)} requests failed"
        elif not reason:
            wrong = sum(a != b for a, b in zip(answers.texts, plain.texts, strict=True))
            numbers = answers.figures(plain) | {"differing": wrong}
            if wrong and options.dtype == "float32":
                reason = f"{wrong} of {len(plain.texts)} answers differ from plain vLLM's"
        yield Row(what, numbers, right=not reason, failed=reason)


def requests(load: Load, number: int, temperature: float, options: ServeOptions) -> list[Any]:
    """The requests of a round, for `vllm bench serve`, each with its arrival time."""
    from vllm.benchmarks.datasets import SampleRequest

    prompts = options.all_prompts()
    found = []
    for index, second in enumerate(load.arrivals(SEED + number)):
        prompt = prompts[index % len(prompts)]
        own = {"temperature": temperature} | ({"seed": SEED + index} if temperature > 0 else {})
        text = prompt.text or _chat(prompt.turns[0], str(options.target))
        found.append(
            SampleRequest(text, 1, options.max_tokens, timestamp=second, request_overrides=own)
        )
    return found


@functools.cache
def _chat(turn: str, target: str) -> str:
    """A user's turn in the target's chat template, if there is one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.chat_template is None:
        return turn
    messages = [{"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return str(text)


def ask(url: str, planned: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Send requests at their arrival times; returns the results of `vllm bench serve`.

    Raises TimeoutError: it took several times the ``seconds`` of arrivals.
    """
    from vllm.benchmarks.serve import TaskType, benchmark

    measured = benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{url}/v1/completions",
        base_url=url,
        model_id=_MODEL,
        model_name=_MODEL,
        tokenizer=None,
        input_requests=list(planned),
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=False,
        goodput_config_dict={},
        max_concurrency=None,
        lora_modules=None,
        extra_headers=None,
        extra_body=None,
        ready_check_timeout_sec=0,
        self_timed=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = asyncio.run(asyncio.wait_for(measured, _DRAIN * seconds))
    return found


@contextlib.contextmanager
def server(
    arm: Arm, options: EngineOptions, more: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a ready server's address; its process group ends with the block, or with this process.

    ``more`` are options of vLLM that extend or override those of the arm.

    Raises JobFailed: it ended or was not ready in time; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    os.environ["no_proxy"] = _HOST
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as costs:
        log = Path(file.name)
        with environment(arm, options, costs, bind=False):
            os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
            child = Child(f"the server of {arm.name}", serve, log)
        try:
            child.channel.send(server_args(arm, options, port, more))
            url = f"http://{_HOST}:{port}"
            _wait(child.process.is_alive, url, arm.name, log)
            yield url
        finally:
            child.end(interrupt=True)


def server_args(
    arm: Arm, options: EngineOptions, port: int, more: Mapping[str, Any] | None = None
) -> list[str]:
    """The arguments of `vllm-medusa serve`."""
    made = settings(arm, options) | dict(more or {})
    found, speculation = [made.pop("model")], made.pop("speculative_config")
    del made["disable_log_stats"]  # servers log statistics by default; there is no flag for it
    arguments: dict[str, Any] = {
        "served_model_name": _MODEL,
        "host": _HOST,
        "port": port,
        "uvicorn_log_level": "warning",
        "enable_chunked_prefill": False,  # vLLM on CPU can't chunk seeded prompts
    } | made
    if speculation:
        arguments["speculative_config"] = json.dumps(speculation)
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found


def serve(channel: Channel) -> None:
    """The body of a server's process."""
    from vllm_medusa.cli.serve import run as serve_vllm

    serve_vllm(channel.recv())


def _wait(alive: Callable[[], bool], url: str, name: str, log: Path) -> None:
    end = time.monotonic() + _START_S
    while alive() and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise JobFailed(f"the server of {name} did not start; the end of its log:\n{end_of(log)}")


CASE = Case(
    ServeOptions,
    run,
    {
        "temperature": ("T", "g"),
        "load": ("requests", ""),
        "arm": ("server", ""),
        "tokens_per_second": ("tokens/s", ".1f"),
        "speed_ratio": ("a request's tokens/s, ratio to plain", ".2f"),
        "speed_ratio_quartiles": ("quartiles", ".2f"),
        "ttft_ratio": ("TTFT, ratio to plain", ".2f"),
        "ttft_ratio_quartiles": ("quartiles", ".2f"),
        "ttft_p50": ("TTFT ms, p50", ".0f"),
        "ttft_p99": ("p99", ".0f"),
        "token_p50": ("TPOT ms, p50", ".0f"),
        "token_p99": ("p99", ".0f"),
        "gap_p50": ("ITL ms, p50", ".0f"),
        "gap_p99": ("p99", ".0f"),
        "requests": ("answers compared with plain vLLM", "d"),
        "differing": ("of these, different (not float32)", "d"),
    },
    quick={"rates": (0.5, 2.0), "requests": 8, "rounds": 1, "max_tokens": 24},
    plot=Plot("rate", ("speed_ratio", "ttft_ratio", "token_p50", "tokens_per_second")),
)
