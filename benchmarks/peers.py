"""Engines for CPUs side by side: vLLM, this plugin, transformers, OpenVINO GenAI, llama.cpp.

    python -m benchmarks peers --texts FOLDER_OF_PROMPTS --batch 1 4 16

All engines run the same target on the same prompts (token ids, rendered once) and cores, and stop
at the same tokens. All are started first, then take turns, group of prompts by group of prompts, so
that other load affects all; the order is reversed from group to group. ``ratio`` compares an arm
with its own engine's plain decoding, round by round. Texts of an arm may differ from those of its
engine's plain decoding, because of near-ties in low precision or another use of random numbers:
they are counted. Tau counts generated tokens per step, without the first token of an answer.

Other engines are installed in environments of their own, in --environments. Each uses its own
defaults for weights: bf16 for vLLM and transformers (--dtype), fp16 files for OpenVINO and
llama.cpp; OpenVINO also with int8 weights. Memory is that of the engine's processes: the peak, and
the proportional set size at the end; vLLM's includes a key-value cache of 0.5 GiB and OpenVINO's of
up to 1 GiB.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from benchmarks.case import ROOT, Case, Plot, Row, titled
from benchmarks.compare import COLUMNS, arm_of
from benchmarks.engines import (
    PLAIN,
    SAMPLED_STOCK,
    SEED,
    WHY,
    Arm,
    ArmSampling,
    EngineOptions,
    quartiles,
    tau_numbers,
)
from benchmarks.engines import engine as vllm_engine
from benchmarks.peers_setup import prepare
from benchmarks.report import describe
from demo import packed
from vllm_medusa.job import JobFailed, Progress
from vllm_medusa.offline.batch import Answer, Result
from vllm_medusa.offline.children import end_of
from vllm_medusa.offline.conversations import prompt_ids
from vllm_medusa.offline.in_turn import Timed
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import Dtype, Positive, option

_WORKER = Path(__file__).with_name("peers_worker.py")
_DRAFTERS = ROOT / "demo" / "drafters"
_KV = {"kv_cache_memory_bytes": 1 << 29}
_GREEDY = "OpenVINO's EAGLE-3 is greedy only"
_SINGLE = "measured with one request at a time only"
_NGRAM = 3  # max tokens that lookup compares
_ENGINES = (  # name, key of `peers_worker.ENGINES`, weights of its export
    ("transformers", "transformers", ""),
    ("OpenVINO fp16", "openvino", "fp16"),
    ("OpenVINO int8", "openvino", "int8"),
    ("llama.cpp", "llama.cpp", ""),
)
_LOOKUP = {  # each engine's names for the number of draft tokens and the max n-gram
    "transformers": ("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    "openvino": ("num_assistant_tokens", "max_ngram_size"),
    "llama.cpp": ("num_pred_tokens", "max_ngram_size"),
}
_TREE = ("num_assistant_tokens", "branching_factor", "tree_depth")


class PeersOptions(EngineOptions):
    """Options of the benchmark."""

    drafter: Path = option(
        "folder of the EAGLE-3 drafter", default=_DRAFTERS / "eagle3", shown="the demo's"
    )
    others: tuple[Path, ...] = option(
        "further heads or drafters for this plugin",
        default=(_DRAFTERS / "hydra", _DRAFTERS / "medusa"),
        metavar="FOLDER",
        shown="the demo's Hydra and Medusa heads",
    )
    environments: Path = option(
        "folder of the other engines' environments and model files",
        default=Path.home() / ".cache" / "vllm-medusa-peers",
        shown="~/.cache/vllm-medusa-peers",
    )
    dtype: Dtype = option("of vLLM and transformers", default="bfloat16")
    rounds: Positive = option("rounds of each load, after a warm-up", default=5)
    chain: Positive = option("draft tokens of the others' chains and lookup", default=4)
    tree: tuple[Positive, ...] = option(
        "OpenVINO's num_assistant_tokens, branching_factor and tree_depth", default=(8, 4, 3)
    )


@dataclass(frozen=True)
class Peer:
    """An engine with one method; ``method`` "plain" is the reference of its engine's others."""

    engine: str
    method: str
    start: Callable[[], AbstractContextManager[Any]]  # of an `in_turn.Runner` with a ``pid``
    greedy: str = ""  # why it is not measured when sampling
    single: str = ""  # why it is not measured in batches
    missing: str = ""  # why it is not measured at all

    @property
    def what(self) -> dict[str, Any]:
        """Columns that identify its rows."""
        name = f"{self.engine}, {self.method}"
        return {"name": name, "arm": name, "engine": self.engine, "method": self.method}

    def reason(self, batch: int, temperature: float) -> str:
        """Why it is not measured under this load; "" if it is."""
        return (temperature > 0 and self.greedy) or (batch > 1 and self.single) or ""


class Worker:
    """`peers_worker` in a process, an `in_turn.Runner`; use it as a context manager."""

    def __init__(self, python: Path, settings: dict[str, Any]):
        """Start an engine. Raises JobFailed: it failed; the message has the end of its log."""
        self.sampling = ArmSampling()  # of later runs; may be replaced
        self._eos = set(settings["eos"])
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-medusa-")  # noqa: SIM115
        own = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(settings["cores"]))}
        self._process = subprocess.Popen(
            [str(python), "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=own,
        )
        self.pid = self._process.pid
        try:
            self.version: str = self._ask(settings)["version"]
        except BaseException:
            self.__exit__()
            raise

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "{}")
        except BrokenPipeError:
            answer = {}
        if not answer or "error" in answer:
            reason = answer.get("error") or f"it ended with status {self._process.wait()}"
            raise JobFailed(f"{reason}; the end of its log:\n{end_of(Path(self._log.name))}")
        return answer

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """See `vllm_medusa.offline.in_turn.Runner`; all prompts are started together."""
        found = self._ask(
            {
                "prompts": [prompt.token_ids for prompt in prompts],
                "seeds": [(seed or 0) + prompt.index for prompt in prompts],
                "max_tokens": self.sampling.max_tokens,
                "temperature": self.sampling.temperature,
            }
        )
        answers = zip(prompts, found["answers"], strict=True)
        return [Result(p, (self._answer(p, steps),)) for p, steps in answers], found["seconds"]

    def _answer(self, prompt: Prompt, steps: list[list[int]]) -> Answer:
        """An answer up to its first EOS token or the limit, as vLLM counts it."""
        answer = Answer(prompt_token_ids=prompt.token_ids, finish_reason="length")
        for step in steps:
            ended = next((n for n, token in enumerate(step, 1) if token in self._eos), len(step))
            kept = step[: min(ended, self.sampling.max_tokens - len(answer.token_ids))]
            answer.token_ids += kept
            answer.delivered += [len(kept)] * bool(kept)
            if kept and kept[-1] in self._eos:
                answer.finish_reason = "stop"
                return answer
        if len(answer.token_ids) < self.sampling.max_tokens:
            raise ValueError(f"an answer ended after {len(answer.token_ids)} tokens without EOS")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


def peers(options: PeersOptions, eos: list[int], progress: Progress) -> Iterator[Peer]:
    """All arms, the plain one of an engine first."""

    def vllm(method: str, arm: Arm | None, missing: str = "") -> Peer:
        assert arm is not None
        greedy = SAMPLED_STOCK if arm.stock else ""
        return Peer("vLLM", method, partial(vllm_engine, arm, options, _KV), greedy, "", missing)

    yield vllm("plain", PLAIN)
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": options.chain}
    config |= {"prompt_lookup_min": 2, "prompt_lookup_max": _NGRAM}
    yield vllm("n-gram", Arm("n-gram", config, stock=True))
    # without its cache of earlier answers, which would hold these very answers
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    missing = "" if find_spec("arctic_inference") else "arctic-inference is not installed"
    yield vllm("suffix decoding", Arm("suffix", config, stock=True), missing)
    yield vllm("EAGLE-3 chain", arm_of(options.drafter, "stock", options.chain))
    for each in (options.drafter, *options.others):
        yield vllm(f"this plugin, {each.name}", arm_of(each, "automatic", 0))
    config = {"method": "medusa", "lookup": True, "budget": "auto"}
    yield vllm("this plugin, lookup", Arm("lookup", config))

    def start(kind: str, weights: str, method: str, knobs: dict[str, int]) -> Worker:
        assert options.target is not None
        drafter = options.drafter if method.startswith("EAGLE-3") else None
        folder = options.environments.expanduser()
        python, files = prepare(folder, kind, weights, options.target, drafter, progress)
        ids = options.cores or sorted(os.sched_getaffinity(0))
        own: dict[str, Any] = {"engine": kind, "cores": ids, "eos": eos, "knobs": knobs}
        own |= {"dtype": options.dtype, "context": options.max_model_len}
        # OpenVINO's default cache has 8 bits
        own["properties"] = {} if weights == "int8" else {"KV_CACHE_PRECISION": "f16"}
        return Worker(python, own | files)

    chain = {"num_assistant_tokens": options.chain}
    tree = dict(zip(_TREE, options.tree, strict=True))
    for engine, kind, weights in _ENGINES:
        lookup = dict(zip(_LOOKUP[kind], (options.chain, _NGRAM), strict=True))
        methods: dict[str, dict[str, int]] = {"plain": {}, "lookup": lookup}
        if kind == "openvino":
            methods |= {"EAGLE-3 chain": chain, "EAGLE-3 tree": tree}
        for method, knobs in methods.items():
            greedy = _GREEDY if method.startswith("EAGLE-3") else ""
            single = "" if kind == "openvino" else _SINGLE
            begin = partial(start, kind, weights, method, knobs)
            yield Peer(engine, method, begin, greedy, single)


def run(options: PeersOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, batch and temperature."""
    options = options.ready(progress)
    assert options.target is not None
    others = tuple(packed.usable(each, options.target) for each in options.others)
    options = replace(options, others=others)
    prompts, eos = rendered(options)
    found = list(peers(options, eos, progress))
    if options.only:  # the plain arms of the engines stay
        named = [p for p in found if re.search(options.only, p.what["name"])]
        engines = {peer.engine for peer in named}
        found = [p for p in found if p in named or (p.method == "plain" and p.engine in engines)]
    with ExitStack() as stack:
        running: dict[Peer, Any] = {}
        for peer in found:
            if peer.missing:
                yield Row(peer.what, note=peer.missing)
                continue
            progress.note(f"{peer.what['name']}: starting")
            try:
                running[peer] = stack.enter_context(peer.start())
            except Exception as error:
                yield Row(peer.what, failed=f"{type(error).__name__}: {error}")
        for batch, temperature in product(options.batch, options.temperatures):
            yield from measure(running, batch, temperature, prompts, options)


def rendered(options: PeersOptions) -> tuple[list[Prompt], list[int]]:
    """The prompts' first turns as token ids, and the ids that end an answer."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(options.target)
    eos = GenerationConfig.from_pretrained(options.target).eos_token_id
    found = []
    for prompt in options.all_prompts():
        ids = list(prompt.token_ids)
        if prompt.text is not None:
            ids = tokenizer.encode(prompt.text)
        elif not ids:
            message = {"role": "user", "content": prompt.turns[0]}
            ids = prompt_ids([*prompt.history, message], tokenizer)
        found.append(Prompt(prompt.index, prompt.line, prompt.request_id, token_ids=tuple(ids)))
    return found, eos if isinstance(eos, list) else [eos]


def measure(
    running: dict[Peer, Any],  # output: arms that fail are removed
    batch: int,
    temperature: float,
    prompts: Sequence[Prompt],
    options: PeersOptions,
) -> Iterator[Row]:
    """The rows of all arms under one load; a first group is a warm-up and not counted."""
    load = {"batch": batch, "temperature": temperature}
    size = batch * math.ceil(len(prompts) / batch)  # full batches
    many = [replace(prompts[i % len(prompts)], index=i) for i in range(size)]
    groups = [many[start : start + batch] for start in range(0, size, batch)]
    seed = SEED if temperature else None
    able, rounds = [], dict[Peer, list[Timed]]()
    for peer, engine in running.items():
        if reason := peer.reason(batch, temperature):
            yield Row(_what(peer, load), note=reason)
            continue
        engine.sampling = ArmSampling(options.max_tokens, temperature)
        able.append(peer)
        rounds[peer] = []
    began = time.perf_counter()
    for number in range(options.rounds + 1):
        if number > 1 and time.perf_counter() - began > (options.seconds or math.inf):
            break
        now = {peer: Timed() for peer in able}
        for group in groups if number else groups[:1]:
            able.reverse()
            for peer in list(able):
                try:
                    now[peer].add(*running[peer].run(group, batch, seed))
                except Exception as error:
                    yield Row(_what(peer, load), failed=f"{type(error).__name__}: {error}")
                    able.remove(peer)
                    del running[peer]
        for peer in able if number else ():
            rounds[peer].append(now[peer])
    plain = {peer.engine: rounds[peer] for peer in able if peer.method == "plain"}
    for peer in (peer for peer in running if peer in able):
        if peer.engine in plain:
            numbers = numbers_of(rounds[peer], plain[peer.engine])
            numbers |= memory(running[peer].pid) | {"version": _version(running[peer])}
            yield Row(_what(peer, load), numbers, right=True)
        else:
            yield Row(_what(peer, load), failed="its engine's plain decoding failed")


def _what(peer: Peer, load: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{peer.what['name']}, T {load['temperature']:g}, batch {load['batch']}"
    return {**peer.what, "name": name, **load}


def numbers_of(own: Sequence[Timed], plain: Sequence[Timed]) -> dict[str, Any]:
    """Medians over rounds, tau of the first round, and the number of answers that differ."""
    rates, base = ([each.tokens / each.seconds for each in of] for of in (own, plain))
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    counts = [(r.acceptance.accepted, r.acceptance.steps) for r in own[0].results.values()]
    both = zip(own, plain, strict=True)
    pairs = [(result, b.results[index]) for a, b in both for index, result in a.results.items()]
    return {
        **tau_numbers(counts),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_quartiles": quartiles(rates),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "ratios": ratios,
        "rounds": len(own),
        "requests": len(pairs),
        "differing": sum(a.answers[0].token_ids != b.answers[0].token_ids for a, b in pairs),
    }


def memory(pid: int) -> dict[str, float]:
    """Peak resident set size and proportional set size of a process and its children, in GB."""
    parent = psutil.Process(pid)
    peak = pss = 0
    for process in (parent, *parent.children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        peak += 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
        pss += process.memory_full_info().pss
    return {"peak_gb": peak / 1e9, "pss_gb": pss / 1e9}


def _version(engine: Any) -> str:
    return getattr(engine, "version", "") or f"vLLM {describe('')['vllm']}, {engine.dtype}"


def text(rows: list[dict[str, Any]]) -> str:
    """The text below the table."""
    return WHY if any(row.get("note") == SAMPLED_STOCK for row in rows) else ""


CASE = Case(
    PeersOptions,
    run,
    {
        **titled("engine method"),
        **{key: COLUMNS[key] for key in ("temperature", "batch", "tokens_per_second")},
        "tokens_per_second_quartiles": ("quartiles", ".1f"),
        "ratio": ("ratio to its plain", ".2f"),
        **{key: COLUMNS[key] for key in ("ratio_quartiles", "tau", "tau_error", "rounds")},
        "requests": ("answers", "d"),
        "differing": ("not its plain text", "d"),
        "peak_gb": ("peak GB", ".2f"),
        "pss_gb": ("PSS GB", ".2f"),
        "version": ("version", ""),
    },
    quick={"prompts": 2, "max_tokens": 32, "rounds": 2},
    plot=Plot("batch", ("tokens_per_second", "ratio"), ("arm",)),
    text=text,
)
