"""Engines for CPUs side by side: vLLM, this plugin, transformers, OpenVINO GenAI, llama.cpp.

    python -m benchmarks peers --texts FOLDER_OF_PROMPTS --batch 1 4 16

All engines run the same target on the same prompts (token ids) and cores, and stop at the same
tokens. The methods of one engine are started together and take turns of --waves answers per batch
slot: when an answer ends, the next request takes its slot, as in a server. Each answer has its own
length (`engines.UnevenAnswer`). ``ratio`` compares each with the engine's plain decoding, round by
round. Engines are measured one after the other, so their tokens per second are comparable only on
an idle machine.

Answers equal to the engine's plain ones are counted; in low precision, near-ties may be resolved
differently. At temperature 0 the largest gap between the logits of differing tokens is reported, as
in `benchmarks.engines`. Tau is that of the first round.

Other engines are installed in environments of their own. vLLM and OpenVINO compute in --dtype, and
are also measured with int8 weights (vLLM then has int8 activations too), llama.cpp by its defaults
with fp16 weights. Memory is that of the engine's processes: the peak, and the proportional set size
at the end; vLLM's includes a key-value cache of 0.5 GiB, OpenVINO's one of up to 1 GiB.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.case import ROOT, Case, Plot, Row, attempt, titled
from benchmarks.compare import COLUMNS, QUICK, arm_of
from benchmarks.engines import (
    PLAIN,
    SAMPLED_STOCK,
    SEED,
    Arm,
    ArmSampling,
    EngineOptions,
    UnevenAnswer,
    explain_notes,
    largest_gap,
    tau_numbers,
    time_numbers,
)
from benchmarks.engines import engine as vllm_engine
from benchmarks.peers_setup import quantized, worker
from demo import packed
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.conversations import prompt_ids
from vllm_medusa.offline.in_turn import InTurn, run_in_turn
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import Positive, option
from vllm_medusa.plugin import installed_vllm

_DRAFTERS = ROOT / "demo" / "drafters"
_KV = {"kv_cache_memory_bytes": 1 << 29}
_GREEDY = "OpenVINO's EAGLE-3 is greedy only"
_SINGLE = "measured with one request at a time only"
_NGRAM = 3  # max tokens that lookup compares
Knobs = dict[str, int]  # an engine's own options for speculation


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
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "of vLLM, transformers and OpenVINO", default="bfloat16"
    )
    rounds: Positive = option("rounds of each load and start, after a warm-up", default=5)
    starts: Positive = option("starts of every engine; starts differ in speed", default=1)
    waves: Positive = option("answers per batch slot and turn", default=3)
    chain: Positive = option("draft tokens of the others' chains and lookup", default=4)
    tree: tuple[Positive, ...] = option(
        "OpenVINO's num_assistant_tokens, branching_factor and tree_depth", default=(8, 4, 3)
    )


@dataclass
class Peer:
    """An engine with one method, an `in_turn.Runner` once started."""

    engine: str
    method: str  # "plain" is the reference of the engine's others
    start: Callable[[], AbstractContextManager[Any]]
    greedy: str = ""  # why it is not measured when sampling
    single: str = ""  # why it is not measured at batch sizes above 1
    missing: str = ""  # why it is not measured at all
    process: Any = None
    failed: str = ""

    @property
    def name(self) -> str:
        """Engine and method."""
        return f"{self.engine}, {self.method}"

    def notes(self, batch: int, temperature: float) -> list[str]:
        """Why it is not measured under a load; empty if it is."""
        reasons = (self.missing, temperature and self.greedy, batch > 1 and self.single)
        return [reason for reason in reasons if reason]

    def what(self, batch: int | None = None, temperature: float = 0.0) -> dict[str, Any]:
        """Columns that identify its row, under a load or without one."""
        own = {"name": self.name, "arm": self.name, "engine": self.engine, "method": self.method}
        if batch is None:
            return own
        own["name"] += f", T {temperature:g}, batch {batch}"
        return own | {"batch": batch, "temperature": temperature}

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """See `vllm_medusa.offline.in_turn.Runner`; sets ``failed`` if it raises."""
        try:
            results, seconds = self.process.run(prompts, concurrency, seed)
            if refused := next((r.error for r in results if r.error), None):
                raise ValueError(refused)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            raise
        return results, seconds


def peers(options: PeersOptions, eos: list[int], progress: Progress) -> Iterator[Peer]:
    """All arms, engine by engine, the plain one first."""
    for int8 in (False, True):
        for method, arm, missing in vllm_methods(options):
            greedy = SAMPLED_STOCK if arm.stock else ""
            start = partial(uneven, arm, options, progress, int8=int8)
            yield Peer("vLLM int8" if int8 else "vLLM", method, start, greedy, missing=missing)

    cores = options.cores or sorted(os.sched_getaffinity(0))
    common: dict[str, Any] = {"target": str(options.target), "dtype": options.dtype}
    common |= {"eos": eos, "cores": cores, "context": options.max_model_len}
    for name, engine, weights, methods in others(options):
        for method, knobs in methods.items():
            settings = common | {"engine": engine, "weights": weights, "knobs": knobs}
            greedy, single = "", "" if engine == "openvino" else _SINGLE
            if method.startswith("EAGLE-3"):
                greedy, settings["drafter"] = _GREEDY, str(options.drafter)
            start = partial(worker, settings, options.environments.expanduser(), progress)
            yield Peer(name, method, start, greedy, single)


def vllm_methods(options: PeersOptions) -> Iterator[tuple[str, Arm, str]]:
    """Methods of vLLM, their arms, and why one can't run."""
    yield "plain", PLAIN, ""
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": options.chain}
    config |= {"prompt_lookup_min": 2, "prompt_lookup_max": _NGRAM}
    yield "n-gram", Arm("n-gram", config, stock=True), ""
    # without its cache of earlier answers, which would contain the same answers
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    missing = "" if find_spec("arctic_inference") else "arctic-inference is not installed"
    yield "suffix decoding", Arm("suffix", config, stock=True), missing
    eagle = options.drafter
    named = {"EAGLE-3 chain": arm_of(eagle, "stock", options.chain)}
    for each in (eagle, *options.others):
        named[f"this plugin, {each.name}"] = arm_of(each, "automatic", 0)
    named[f"this plugin, {eagle.name} and lookup"] = arm_of(eagle, "automatic+lookup", 0)
    for method, arm in named.items():
        assert arm is not None
        yield method, arm, ""
    config = {"method": "medusa", "lookup": True, "budget": "auto"}
    yield "this plugin, lookup", Arm("lookup", config), ""


@contextmanager
def uneven(
    arm: Arm, options: PeersOptions, progress: Progress, *, int8: bool = False
) -> Iterator[Any]:
    """A started vLLM whose answers are of different lengths, as those of the other engines."""
    if int8:
        assert options.target is not None
        folder = options.environments.expanduser()
        options = replace(options, target=quantized(options.target, folder, progress))
    with vllm_engine(arm, options, _KV) as process:
        process.session = partial(UnevenAnswer, mean=options.max_tokens)
        yield process


def others(options: PeersOptions) -> Iterator[tuple[str, str, str, dict[str, Knobs]]]:
    """Engines, their names in `peers_worker.ENGINES`, weights, and their options by method."""
    plain: dict[str, Knobs] = {"plain": {}}
    lookup = {"prompt_lookup_num_tokens": options.chain, "max_matching_ngram_size": _NGRAM}
    yield "transformers", "transformers", "", plain | {"lookup": lookup}
    chain = {"num_assistant_tokens": options.chain}
    names = ("num_assistant_tokens", "branching_factor", "tree_depth")
    methods = {"lookup": chain | {"max_ngram_size": _NGRAM}, "EAGLE-3 chain": chain}
    methods["EAGLE-3 tree"] = dict(zip(names, options.tree, strict=True))
    for weights in ("fp16", "int8"):
        yield f"OpenVINO {weights}", "openvino", weights, plain | methods
    lookup = {"num_pred_tokens": options.chain, "max_ngram_size": _NGRAM}
    yield "llama.cpp", "llama.cpp", "", plain | {"lookup": lookup}


def run(options: PeersOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, batch and temperature."""
    options = options.ready(progress)
    assert options.target is not None
    usable = tuple(packed.usable(each, options.target) for each in options.others)
    options = replace(options, others=usable)
    prompts, eos = rendered(options)
    every = list(peers(options, eos, progress))
    named = options.chosen(every)
    for engine, each in groupby(every, key=lambda peer: peer.engine):
        wanted = any(peer.engine == engine for peer in named)
        group = [peer for peer in each if peer in named or (wanted and peer.method == "plain")]
        for peer in group:
            if notes := peer.notes(max(options.batch), max(options.temperatures)):
                yield Row(peer.what(), note="; ".join(notes))
        group = [peer for peer in group if not peer.missing]
        loads = {load: Figures() for load in product(options.batch, options.temperatures)}
        for start in range(1, options.starts + 1):
            with ExitStack() as stack:
                for peer in list(group):
                    progress.note(f"{peer.name}: starting")
                    try:
                        peer.process, peer.failed = stack.enter_context(peer.start()), ""
                    except Exception as error:
                        group.remove(peer)
                        yield Row(peer.what(), failed=f"{type(error).__name__}: {error}")
                for load, figures in loads.items():
                    able = measure(group, *load, prompts, options, figures)
                    if start == options.starts:
                        yield from rows_of(group, able, load, options, figures)


def rendered(options: PeersOptions) -> tuple[list[Prompt], list[int]]:
    """The prompts' first turns as token ids, and the ids that end an answer."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(options.target)
    eos = GenerationConfig.from_pretrained(options.target).eos_token_id
    found = []
    for prompt in options.all_prompts():
        ids: Sequence[int] = prompt.token_ids
        if prompt.text is not None:
            ids = tokenizer.encode(prompt.text)
        elif prompt.turns:
            messages = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
            ids = prompt_ids(messages, tokenizer)
        found.append(replace(prompt, text=None, history=(), turns=(), token_ids=tuple(ids)))
    return found, eos if isinstance(eos, list) else [eos]


@dataclass
class Figures:
    """One engine's figures under a load, of all starts, by method."""

    found: dict[str, InTurn] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # reasons


def measure(
    group: list[Peer],
    batch: int,
    temperature: float,
    prompts: list[Prompt],
    options: PeersOptions,
    figures: Figures,
) -> list[Peer]:
    """Run one engine's arms under one load; if an arm fails, the others are run again without it.

    Returns those that have figures.
    """
    load = (batch, temperature)
    turn = batch * options.waves
    size = turn * math.ceil(len(prompts) / turn)  # full turns
    many = [replace(prompts[i % len(prompts)], index=i) for i in range(size)]
    failed = figures.failed
    for peer in group:
        if peer.failed:
            failed.setdefault(peer.method, peer.failed)
    able = [peer for peer in group if not peer.notes(*load) and peer.method not in failed]
    for peer in able:
        peer.process.sampling = ArmSampling(options.max_tokens, temperature)
    found: list[InTurn] = []
    while not found and able and able[0].method == "plain":
        try:
            found = run_in_turn(
                able,
                many,
                concurrency=batch,
                seed=SEED if temperature else None,
                turn=turn,
                rounds=options.rounds,
                seconds=options.seconds or math.inf,
                warm_up=True,
                previous=[each for name, each in figures.found.items() if name not in failed],
            )
        except Exception:
            failed |= {peer.method: peer.failed for peer in able if peer.failed}
            if all(peer.method not in failed for peer in able):
                raise
            able = [peer for peer in able if peer.method not in failed]
    if not found:
        failed |= {peer.method: "its engine's plain decoding failed" for peer in able}
    figures.found = {peer.method: each for peer, each in zip(able, found, strict=False)}
    return able if found else []


def rows_of(
    group: list[Peer],
    able: list[Peer],
    load: tuple[int, float],
    options: PeersOptions,
    figures: Figures,
) -> Iterator[Row]:
    """The rows of one engine's arms under one load, those that failed first."""
    for peer in group:
        if peer.method in figures.failed:
            yield Row(peer.what(*load), failed=figures.failed[peer.method])
    for peer in able:
        what, found = peer.what(*load), figures.found[peer.method]
        yield attempt(what, partial(measured, what, peer.process, found, options))


def measured(what: dict[str, Any], process: Any, found: InTurn, options: PeersOptions) -> Row:
    """Speed, tau, how many answers equal the engine's plain ones, memory and version."""
    results = found.candidate.results.values()
    numbers = tau_numbers([(r.acceptance.accepted, r.acceptance.steps) for r in results])
    numbers |= time_numbers(found, what["batch"]) | {"rates": found.candidate.rates}
    numbers["requests"] = found.requests
    numbers["equal"] = found.requests - len(found.differences)
    if found.differences and not what["temperature"]:
        numbers["gap"] = largest_gap(str(options.target), found.differences)
    version = getattr(process, "version", "")
    numbers["version"] = version or f"vLLM {installed_vllm()[1]}, {process.dtype}"
    return Row(what, numbers | memory(process.pid), right=True)


def memory(pid: int) -> dict[str, float]:
    """Peak resident set size and proportional set size of a process and its children, in GB."""
    parent = psutil.Process(pid)
    peak = pss = 0
    for process in (parent, *parent.children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        peak += 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
        pss += process.memory_full_info().pss
    return {"peak_gb": peak / 1e9, "pss_gb": pss / 1e9}


CASE = Case(
    PeersOptions,
    run,
    {
        **titled("engine method"),
        **{key: COLUMNS[key] for key in ("temperature", "batch", "tokens_per_second")},
        "ratio": ("ratio to its plain", ".2f"),
        **{key: COLUMNS[key] for key in ("ratio_quartiles", "tau", "tau_error", "rounds")},
        "requests": ("answers", "d"),
        "equal": ("equal to its plain", "d"),
        "gap": COLUMNS["gap"],
        "peak_gb": ("peak GB", ".2f"),
        "pss_gb": ("PSS GB", ".2f"),
        "version": ("version", ""),
    },
    QUICK,
    Plot("batch", ("tokens_per_second", "ratio")),
    explain_notes,
)
