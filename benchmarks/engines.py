"""Comparison of engines: each in a subprocess, on the same prompts, alternating with plain vLLM.

An arm is one way to decode. Every arm alternates with plain vLLM (A B A B), so that other load on
the machine affects both; a ratio is the median over rounds of throughputs, prefills included. In
float32 all tokens must equal plain vLLM's, in every round and at every temperature (requests are
seeded). In other dtypes, near-ties are resolved differently depending on the number of rows, in
plain vLLM too: different answers are counted, and at temperature 0 the largest difference of the
two tokens' logits in float32 is reported.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import ROOT, Row
from demo import packed, smollm2
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Conversation, Engine, Request, Result
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.in_turn import Difference, InTurn, Timed, run_in_turn
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt, load_prompts
from vllm_medusa.options import Above, AtLeastZero, Dtype, FromZero, Options, Positive, option
from vllm_medusa.tree.topology import MAX_NODES

SEED = 0
SAMPLED_STOCK = "not measured when sampling, see below"
_OPENMP = "libiomp5.so"  # Intel's, which vLLM recommends on CPUs
_KV_BYTES = 1 << 30
_PREFILLS = 16  # full-length prompts that fit into a step
# the engine's counters of accepted draft tokens: those only copied, and all
_COPIED = ("medusa_lookup_accepted_tokens", "spec_decode_num_accepted_tokens")
Tasks = dict[str, list[Prompt]]
Counts = Sequence[tuple[int, int]]  # accepted tokens and steps per prompt


class EngineOptions(Options):
    """Common options of all engine benchmarks."""

    target: Path | None = option(
        "folder of the target; default: SmolLM2-135M-Instruct, as in `make demo`", default=None
    )
    drafter: Path = option(
        "folder of the target's heads or EAGLE drafter",
        default=ROOT / "demo" / "drafters" / "hydra",
        shown="the demo's Hydra heads",
    )
    texts: tuple[Path, ...] = option(
        "files of prompts, or folders of them, one file per task",
        default=(ROOT / "demo" / "prompts.jsonl",),
        shown="demo/prompts.jsonl",
    )
    prompts: Positive = option("max prompts per file", default=8)
    max_tokens: Positive = option("max tokens per answer", default=96)
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.0, 0.7))
    batch: tuple[Positive, ...] = option("concurrent requests", default=(1,))
    rounds: FromZero = option(
        "rounds per arm, alternating with plain vLLM; 0: only tokens per step", default=5
    )
    seconds: Above | None = option("time limit per point for starting rounds", default=None)
    only: str | None = option("regular expression of the arms' names", default=None)
    dtype: Dtype = option(default="float32")
    max_model_len: Positive = option(default=2048)
    cores: tuple[FromZero, ...] = option("core ids, on CPUs (default: all available)", default=())
    eager: bool = option("no torch.compile", default=False)

    def ready(self, progress: Progress) -> Any:
        """The same options with a target and an unpacked drafter, created in .demo if needed."""
        target = self.target or smollm2.build(smollm2.MADE / "target", note=progress.note)
        return replace(self, target=target, drafter=packed.usable(self.drafter, target))

    def tasks(self) -> Tasks:
        """The prompts of each file, by its name.

        Raises ValueError: a file is unreadable or has bad lines.
        """
        files = [
            file
            for path in self.texts
            for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
        ]
        return {file.stem: load_prompts(file)[: self.prompts] for file in files}

    def chosen(self, arms: Sequence[Any]) -> list[Any]:
        """Those with a ``name`` that --only matches. Raises ValueError: it matches none."""
        found = [arm for arm in arms if re.search(self.only or "", arm.name)]
        if self.only and not found:
            names = "; ".join(arm.name for arm in arms)
            raise ValueError(f"--only {self.only} matches none of: {names}. Correct or omit it")
        return found

    def all_prompts(self) -> list[Prompt]:
        """The prompts of all tasks, each with a unique index."""
        found = [prompt for own in self.tasks().values() for prompt in own]
        return [replace(prompt, index=index) for index, prompt in enumerate(found)]


def answer_limit(prompt: Prompt, mean: int) -> int:
    """Max tokens of an answer: 0.5 to 1.5 times ``mean``, drawn from the prompt's index."""
    return random.Random(prompt.index).randint(max(1, mean // 2), mean + mean // 2)


@dataclass
class UnevenAnswer(Conversation):
    """A prompt whose answer has at most `answer_limit` tokens.

    Answers of equal length end at the same step in plain vLLM, but not with drafts. Plain vLLM
    would then have fuller batches and fewer steps with a prefill, which real workloads do not have.
    """

    mean: int = 2

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        limit = answer_limit(self.prompt, self.mean)
        return replace(super().next_request(engine), options={"max_tokens": limit})


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    name: str
    config: Mapping[str, Any] | None = None  # its `speculative_config`
    what: Mapping[str, Any] = field(default_factory=dict)  # additional columns of its rows
    stock: bool = False  # vLLM's own speculation, without this plugin
    request: Mapping[str, Any] | None = None  # `extra_args` of its requests
    against: str = ""  # an earlier arm as reference for gains
    exact: bool = True  # False: its tokens may differ from plain vLLM's when sampling

    @property
    def engine(self) -> tuple[bool, str]:
        """Arms with the same can share an engine."""
        return self.stock, json.dumps(self.config)


PLAIN = Arm("plain")


@dataclass(frozen=True)
class ArmSampling(Sampling):
    """Sampling parameters with the plugin's request options."""

    extra_args: Mapping[str, Any] | None = None


class Remembered:
    """Plain vLLM for comparing tokens only: each group of prompts is generated once and cached."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.found: dict[str, tuple[list[Result], float]] = {}

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """See `vllm_medusa.offline.in_turn.Runner`."""
        key = repr((prompts, self.engine.sampling, seed))
        if key not in self.found:
            self.found[key] = self.engine.run(prompts, concurrency, seed)
        return self.found[key]


Judge = Callable[[Sequence[Result]], dict[str, Any]]  # answers by prompt -> additional numbers


def compare(
    arms: Sequence[Arm],
    options: EngineOptions,
    progress: Progress,
    tasks: Tasks,
    *,
    waves: int = 1,  # prompts per batch slot and turn
    starts: int = 1,  # of every engine, each with all rounds
    session: Callable[[Prompt], Any] = Conversation,
    judge: Judge | None = None,
    engine_args: Mapping[str, Any] | None = None,  # for all engines
) -> Iterator[Row]:
    """A row for each arm, batch, temperature and task, and one for all tasks combined.

    Adjacent arms of one configuration share an engine. An arm whose engine fails has no more rows
    with numbers; the others are measured. Rows come in the last of ``starts``.
    """
    counts: dict[tuple[Any, ...], Counts] = {}
    loads = [  # each with a point per task
        [Point(*load, task, tasks[task], options, waves) for task in tasks]
        for load in product(options.chosen(arms), options.batch, options.temperatures)
    ]
    groups = [list(each) for _, each in groupby(loads, key=lambda load: load[0].arm.engine)]
    for start in range(1, starts + 1):
        is_last = start == starts
        with engine(PLAIN, options, engine_args) as plain:
            plain.session = session
            baseline = plain if options.rounds else Remembered(plain)
            for group in list(groups):
                arm, left = group[0][0].arm, list(group)
                progress.note(f"{arm.name}: starting the engine")
                try:
                    with engine(arm, options, engine_args) as process:
                        process.session = session
                        while left:
                            rows = []
                            for point in left[0]:
                                point.run(plain, baseline, process)
                                if is_last:
                                    rows.append(point.row(counts, judge))
                                    yield rows[-1]
                            if len(rows) > 1:
                                yield _together(rows, replace(left[0][0], task="all").what)
                            del left[0]
                except Exception as error:
                    groups.remove(group)
                    reason = f"{type(error).__name__}: {error}"
                    for load in left if is_last else group:
                        yield Row(replace(load[0], task="").what, failed=reason)


@dataclass
class Point:
    """An arm under one load, and its figures so far."""

    arm: Arm
    batch: int
    temperature: float
    task: str
    prompts: Sequence[Prompt]
    options: EngineOptions
    waves: int
    found: list[InTurn] = field(default_factory=list)  # plain vLLM's and the arm's, of all starts
    first: float = 0.0  # ratio of a warm-up of one turn, in the first start
    copied: Any = 0.0  # accepted draft tokens [2]: those only copied, and all

    @property
    def what(self) -> dict[str, Any]:
        """Columns that identify its row."""
        arm, load = self.arm, {"batch": self.batch, "temperature": self.temperature}
        name = f"{arm.name}, T {self.temperature:g}, batch {self.batch}"
        name += f", {self.task}" if self.task else ""
        what = {"name": name, "arm": arm.name, **arm.what, **load}
        return what | ({"texts": self.task} if self.task else {})

    @property
    def note(self) -> str:
        """Why it is not measured; empty if it is."""
        return SAMPLED_STOCK if self.arm.stock and self.temperature > 0 else ""

    def run(self, plain: EngineProcess, baseline: Any, process: EngineProcess) -> None:
        """Run plain vLLM (``baseline``: itself, or `Remembered`) and the arm for all rounds."""
        if self.note:
            return
        options, batch = self.options, self.batch
        plain.sampling = ArmSampling(options.max_tokens, self.temperature)
        process.sampling = replace(plain.sampling, extra_args=self.arm.request)
        how: dict[str, Any] = {"concurrency": batch, "seed": SEED if self.temperature else None}
        turn, prompts = batch * self.waves, list(self.prompts)
        if options.rounds:
            size = max(turn, len(prompts))
            prompts = [replace(prompts[i % len(prompts)], index=i) for i in range(size)]
            _, first = run_in_turn([baseline, process], prompts[:turn], **how, turn=turn)
            self.first = self.first or first.ratio
            seconds = options.seconds or math.inf
            how |= {"turn": turn, "rounds": options.rounds, "seconds": seconds}
        else:
            how["turn"] = len(prompts)
        before = self._copies(process)
        self.found = run_in_turn([baseline, process], prompts, **how, previous=self.found)
        self.copied = self.copied + self._copies(process) - before

    def _copies(self, process: EngineProcess) -> Any:
        lookup = (self.arm.config or {}).get("lookup", False)
        return np.array([process.count(name) for name in _COPIED]) if lookup else np.zeros(2)

    def row(self, counts: dict[tuple[Any, ...], Counts], judge: Judge | None) -> Row:
        """Its row; ``counts`` are those of all points so far, it adds its own."""
        if self.note:
            return Row(self.what, note=self.note)
        arm, options, batch = self.arm, self.options, self.batch
        _, found = self.found
        load = (batch, self.temperature, self.task)
        results = [found.candidate.results[index] for index in sorted(found.candidate.results)]
        own = [(r.acceptance.accepted, r.acceptance.steps) for r in results]
        counts[arm.name, *load] = own
        numbers = tau_numbers(own, counts.get((arm.against, *load)))
        numbers |= {"requests": found.requests}
        numbers["plain_steps"] = sum(r.acceptance.steps for r in found.baseline.results.values())
        if options.rounds:
            numbers |= time_numbers(found, batch) | {"first": self.first}
        if self.copied[1]:
            numbers["copied"] = float(self.copied[0] / self.copied[1])
        if judge is not None:
            numbers |= judge(results)
        wrong = found.differences if arm.exact or not self.temperature else []
        if options.dtype != "float32":
            numbers["differing"] = len(wrong)
            if wrong and not self.temperature:
                numbers["gap"] = largest_gap(str(options.target), wrong)
            wrong = []
        reason = ""
        if wrong:
            where = f"{wrong[0].prompt.request_id} at token {wrong[0].position}"
            reason = f"{len(wrong)} of {found.requests} answers differ from plain vLLM's"
            reason += f", first {where}"
        return Row(self.what, numbers, right=not wrong, failed=reason)


def _together(rows: Sequence[Row], what: dict[str, Any]) -> Row:
    """Tau over the steps of all tasks, and the geometric mean of their ratios."""
    right = [row for row in rows if row.right]
    if len(right) < len(rows):
        return Row(what, note="some tasks have no numbers")
    steps = sum(row.numbers["steps"] for row in right)
    tau = sum(row.numbers["tau"] * row.numbers["steps"] for row in right) / max(steps, 1)
    numbers = {"tau": tau, "steps": steps}
    if "ratio" in right[0].numbers:
        numbers["ratio"] = statistics.geometric_mean(row.numbers["ratio"] for row in right)
    return Row(what, numbers, right=True)


def explain_notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text below a table with the note `SAMPLED_STOCK`; else empty."""
    if not any(row.get("note") == SAMPLED_STOCK for row in rows):
        return ""
    return (
        "vLLM's own speculation is not measured at temperatures above 0: on CPUs the rejection "
        "sampler of vLLM 0.32 is wrong in every batch with a sampled request, with or without this "
        "plugin; elsewhere it uses other random numbers than plain vLLM."
    )


def tau_numbers(counts: Counts, base: Counts | None = None) -> dict[str, Any]:
    """Tau and, if there is a ``base`` on the same prompts, the gain relative to it."""
    tau, error = with_error(counts)
    numbers = {"tau": tau, "tau_error": error, "steps": sum(steps for _, steps in counts)}
    if base is not None:
        gain, error = with_error(counts, base)
        numbers |= {"gain": gain - 1, "gain_error": error}
    return numbers


def with_error(counts: Counts, base: Counts | None = None) -> tuple[float, float]:
    """Tau, or its ratio to that of ``base`` on the same prompts, and its jackknife error."""

    def taus(each: Counts) -> Any:  # of all prompts, then [n] omitting each of them
        accepted, steps = np.array(each, dtype=float).T
        totals = accepted.sum() - np.array([0.0, *accepted]), steps.sum() - np.array([0.0, *steps])
        return 1 + totals[0] / np.maximum(totals[1], 1)

    found = taus(counts) if base is None else taus(counts) / taus(base)
    without, count = found[1:], len(counts)
    spread = ((without - without.mean()) ** 2).sum()
    return float(found[0]), math.sqrt((count - 1) / count * spread) if count > 1 else 0.0


def largest_gap(target: str, differences: Sequence[Difference]) -> float:
    """Largest difference of logits between plain vLLM's token and the arm's at first differences.

    They are the target's in float32, from transformers. A step of bfloat16 is 1/8 at a logit of 16.
    """
    import torch

    gaps = []
    distinct = {(d.context, d.baseline, d.candidate): d for d in differences}
    for each in distinct.values():  # rounds repeat most of them
        if each.baseline is not None and each.candidate is not None:
            with torch.inference_mode():
                logits = _in_float32(target)(torch.tensor([each.context])).logits[0, -1]
            gaps.append(abs(float(logits[each.baseline] - logits[each.candidate])))
    return max(gaps, default=0.0)  # 0: answers only differ in length


@functools.lru_cache(maxsize=1)
def _in_float32(target: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype="float32")


def time_numbers(found: InTurn, batch: int) -> dict[str, Any]:
    """Medians over rounds, and the spread of the ratio; milliseconds per step with prefills."""

    def step_ms(timed: Timed) -> float:
        steps = timed.acceptance.steps + len(timed.results) * len(timed.rates)
        return 1e3 * timed.seconds * batch / max(steps, 1)

    ratios = found.ratios
    quartiles = [ratios[0], ratios[0]]
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        quartiles = [low, high]
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles,
        "ratios": ratios,
        "tokens_per_second": statistics.median(found.candidate.rates),
        "plain_tokens_per_second": statistics.median(found.baseline.rates),
        "step_ms": step_ms(found.candidate),
        "plain_step_ms": step_ms(found.baseline),
        "rounds": len(ratios),
    }


@contextmanager
def engine(
    arm: Arm, options: EngineOptions, engine_args: Mapping[str, Any] | None = None
) -> Iterator[EngineProcess]:
    """An arm's started engine."""
    sampling = ArmSampling(options.max_tokens, max(options.temperatures))
    with tempfile.TemporaryDirectory() as costs:
        with environment(arm, options, costs):
            process = EngineProcess(settings(arm, options, engine_args), sampling)
        with process:
            yield process


def settings(
    arm: Arm, options: EngineOptions, engine_args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` for an arm."""
    requests = max(8, *options.batch)
    return {
        "model": str((options.target or Path()).absolute()),
        "speculative_config": arm.config and dict(arm.config),
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": requests,
        # prompts are never chunked (vLLM on CPU can't chunk seeded ones), trees always fit
        "max_num_batched_tokens": max(
            options.max_model_len * min(requests, _PREFILLS), MAX_NODES * requests
        ),
        "enable_prefix_caching": not options.rounds,  # the same prompts are repeated
        "enforce_eager": options.eager,
        "kv_cache_memory_bytes": _KV_BYTES,
        "disable_log_stats": not (arm.config or {}).get("lookup", False),  # copies are counted
    } | dict(engine_args or {})


@contextmanager
def environment(
    arm: Arm, options: EngineOptions, costs: str, *, bind: bool = True
) -> Iterator[None]:
    """Set the environment of processes started inside the block.

    An automatic budget stores its step costs in the empty folder ``costs``. On CPUs, a process that
    runs the model is bound to cores as vLLM's multiprocess executor binds its workers, with Intel's
    OpenMP if installed. Without ``bind`` this is left to that executor: a bound server would bind
    its main thread to one core, and its workers would inherit that.
    """
    import torch

    kept = dict(os.environ)
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_PLUGINS"] = "none" if arm.stock or arm.config is None else "medusa"
    if (arm.config or {}).get("budget") == "auto":
        os.environ["VLLM_CACHE_ROOT"] = costs
    if not torch.accelerator.is_available():
        ids = options.cores or tuple(sorted(os.sched_getaffinity(0)))
        os.environ |= _binding(",".join(map(str, ids)), len(ids), bind)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _binding(ids: str, count: int, bind: bool) -> dict[str, str]:
    found = {"VLLM_CPU_OMP_THREADS_BIND": ids}
    library = Path(sys.prefix) / "lib" / _OPENMP
    if library.exists():
        found["LD_PRELOAD"] = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    if not bind:
        return found
    found["OMP_NUM_THREADS"] = str(count)
    if not library.exists():
        return found | {"GOMP_CPU_AFFINITY": ids.replace(",", " ")}
    found["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{ids}]"
    return found | {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
