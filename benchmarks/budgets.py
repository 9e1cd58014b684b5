"""The automatic budget against fixed ones, which take turns in one engine.

    python -m benchmarks budgets --drafter DRAFTER --batch 1 4 --nodes 1 2 4 8 --prompts 48

Engines of one configuration differ by some per cent from start to start, and machines change their
speed within seconds; here, all budgets share both. First, the automatic budget alone answers all
prompts. Then another budget decides every `_TURN` steps; in each cycle, all have one turn, in
random order. The first step of a turn verifies what an earlier budget drafted: it does not count,
and the automatic budget learns no cost from it. Steps with a prefill or without a full batch do not
count either. Prompts are answered again in each round, so acceptance is known from earlier rounds.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Plot, Row
from benchmarks.compare import AUTOMATIC, COLUMNS, arm_of
from benchmarks.engines import (
    PLAIN,
    SEED,
    Arm,
    ArmSampling,
    EngineOptions,
    UnevenAnswer,
    engine,
    environment,
    largest_gap,
    settings,
)
from vllm_medusa.budget.policy import FixedBudget
from vllm_medusa.job import SILENT, JobFailed, Progress
from vllm_medusa.offline.batch import Result, run_batch
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.in_turn import difference
from vllm_medusa.options import Above, FromZero, Positive, option

_TURN = 20  # steps
_RESAMPLED = 1000
NONE = "no drafts"


class BudgetOptions(EngineOptions):
    """Options of the benchmark."""

    nodes: tuple[Positive, ...] = option("fixed budgets: draft nodes per request", default=(2, 4))
    rounds: FromZero = option("passes over the prompts with all budgets in turn", default=5)
    seconds: Above | None = option("limit after which no pass starts, per load", default=None)

    def check(self) -> None:
        """See `Options.check`."""
        if not self.rounds:
            raise ValueError("rounds is 0; use at least 1")
        if self.only:
            raise ValueError(f"only is {self.only!r}, but all budgets run; choose --nodes instead")


@dataclass
class Turns:
    """Replaces a scheduler's budget every few steps, and records their steps.

    Attributes:
        budgets: by name; the automatic one is the scheduler's own.
        steps: [turn, name, ms, tokens, nodes] of each step that counts.

    """

    scheduler: Any
    nodes: tuple[int, ...]
    batch: int
    steps: list[tuple[int, str, float, int, int]] = field(default_factory=list)
    budgets: dict[str, Any] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _turn: int = 0
    _step: int = 0  # of the turn
    _name: str = ""

    def __post_init__(self) -> None:
        """Wrap the method that receives the time of each step."""
        if self.scheduler.ahead:
            raise ValueError("the scheduler is asynchronous; this benchmark requires vLLM on a CPU")
        if (most := max(self.nodes)) > self.scheduler.max_drafts:
            raise ValueError(f"nodes has {most}; use at most {self.scheduler.max_drafts}")
        self.budgets = {AUTOMATIC: self.scheduler.policy}
        self.budgets |= {str(nodes): FixedBudget(nodes) for nodes in (0, *self.nodes)}
        learn = self.scheduler._learn_time
        shuffled = random.Random(SEED).sample

        def learn_and_turn(ended: Any) -> None:
            if ended is None:
                return
            step, ms = ended
            if self._step > 1:
                if not step.prefill and step.requests == self.batch:
                    self.steps.append((self._turn, self._name, ms, step.tokens, step.nodes))
                learn(ended)
            elif self._name == AUTOMATIC:
                self.budgets[AUTOMATIC]._last_limit = step.limit
            if self._step in (0, _TURN):
                self._order = self._order or shuffled([*self.budgets], len(self.budgets))
                self._turn, self._step, self._name = self._turn + 1, 0, self._order.pop()
                self.scheduler.policy = self.budgets[self._name]
            self._step += 1

        self.scheduler._learn_time = learn_and_turn


def run(options: BudgetOptions, progress: Progress) -> Iterator[Row]:
    """A row for each load and budget; in float32 only if all tokens equal plain vLLM's."""
    options = options.ready(progress)
    arm = arm_of(options.drafter, AUTOMATIC, 0)
    assert arm is not None
    prompts = options.all_prompts()
    if len(prompts) < (least := 2 * max(options.batch)):  # few steps would have a full batch
        raise ValueError(f"{len(prompts)} prompts for batch {least // 2}; use at least {least}")
    for temperature in options.temperatures:
        seed = SEED if temperature else None
        progress.note(f"T {temperature:g}: plain vLLM's tokens")
        with engine(PLAIN, replace(options, temperatures=(temperature,))) as plain:
            plain.session = session(options)
            expected, _ = plain.run(prompts, max(options.batch), seed)
        right = {result.prompt.index: result for result in expected}
        for batch in options.batch:
            progress.note(f"T {temperature:g}, batch {batch}: all budgets")
            what = {"batch": batch, "temperature": temperature, **arm.what}
            try:
                yield from _rows(what, arm, right, options, progress)
            except (ValueError, OSError, JobFailed) as error:
                name = f"{what['drafter']}, batch {batch}, T {temperature:g}"
                yield Row({"name": name, **what}, failed=f"{type(error).__name__}: {error}")


def session(options: BudgetOptions) -> Any:
    """Creates the session of a prompt."""
    return partial(UnevenAnswer, mean=options.max_tokens)


def measure(
    options: BudgetOptions, *, arm: Arm, batch: int, temperature: float, progress: Progress = SILENT
) -> tuple[list[Result], list[tuple[int, str, float, int, int]]]:
    """Results of all passes over the prompts, and `Turns.steps`."""
    from vllm_medusa.config import run_engines_in_this_process
    from vllm_medusa.offline.engine import VllmEngine

    run_engines_in_this_process()
    sampling = ArmSampling(options.max_tokens, temperature)
    running = VllmEngine(settings(arm, options), sampling, seeded=temperature > 0)
    seed = SEED if temperature else None
    how: dict[str, Any] = {"concurrency": batch, "seed": seed, "session": session(options)}
    prompts = options.all_prompts()
    found = list(run_batch(prompts, running, **how))
    core: Any = running.llm.llm_engine.engine_core
    turns = Turns(core.engine_core.scheduler, options.nodes, batch)
    start = time.perf_counter()
    for _ in range(options.rounds):
        if options.seconds is None or time.perf_counter() - start < options.seconds:
            found += run_batch(prompts, running, **how)
    if refused := next((result.error for result in found if result.error), None):
        raise ValueError(refused)
    return found, turns.steps


def _rows(
    what: dict[str, Any],
    arm: Arm,
    right: dict[int, Result],  # plain vLLM's, by prompt index
    options: BudgetOptions,
    progress: Progress,
) -> Iterator[Row]:
    batch, temperature = what["batch"], what["temperature"]
    how: dict[str, Any] = {"arm": arm, "batch": batch, "temperature": temperature}
    with tempfile.TemporaryDirectory() as folder, environment(arm, options, folder):
        log = Path(folder, "log")
        found, steps = run_in_process(measure, options, progress, log=log, **how)
    pairs = [difference(right[each.prompt.index], each) for each in found]
    wrong = [each for each in pairs if each is not None]
    checked: dict[str, Any] = {"requests": len(found)}
    if options.dtype != "float32":
        checked["differing"] = len(wrong)
        if wrong and not temperature:
            checked["gap"] = largest_gap(str(options.target), wrong)
        wrong = []
    reason = f"{len(wrong)} of {len(found)} answers differ from plain vLLM's" if wrong else ""
    names = ["0", *map(str, options.nodes), AUTOMATIC]
    for name, numbers in summarize(steps, names, batch).items():
        budget = NONE if name == "0" else name if name == AUTOMATIC else f"{name} nodes"
        row = {"name": f"{what['drafter']}, batch {batch}, T {temperature:g}, {budget}"}
        row |= {"arm": budget, **what}
        yield Row(row, numbers | checked, right=not wrong, failed=reason)


def summarize(
    steps: list[tuple[int, str, float, int, int]], names: list[str], batch: int
) -> dict[str, dict[str, Any]]:
    """Numbers of each budget; ratios of tokens per ms to the first one's, with quartiles.

    The last budget also has its ratio to the best of the others. Quartiles are of ratios in
    resampled cycles (bootstrap).
    """
    cycles = 1 + max((turn - 1 for turn, *_ in steps), default=0) // len(names)
    sums = np.zeros((len(names), cycles, 4))  # tokens, ms, nodes, steps
    for turn, name, ms, tokens, nodes in steps:
        sums[names.index(name), (turn - 1) // len(names)] += tokens, ms, nodes, 1
    for name, count in zip(names, sums[:, :, 3].sum(1), strict=True):
        if not count:
            raise ValueError(f"no step of a full batch with budget {name}; use more --rounds")
    drawn = np.random.default_rng(SEED).integers(cycles, size=(_RESAMPLED, cycles))
    some = sums[:, drawn].sum(2)  # [names, resampled, 4]
    rates = some[..., 0] / np.maximum(some[..., 1], 1e-9)
    totals = sums.sum(1)
    rate = totals[:, 0] / totals[:, 1]
    best = int(rate[:-1].argmax())

    def relative(index: int, base: int) -> tuple[float, list[float]]:
        quartiles = np.quantile(rates[index] / np.maximum(rates[base], 1e-9), (0.25, 0.75))
        return float(rate[index] / rate[base]), quartiles.tolist()

    found: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(names):
        tokens, ms, nodes, count = totals[index].tolist()
        own = found[name] = {"tau": tokens / count / batch, "verified": nodes / count / batch}
        own |= {"step_ms": ms / count, "steps": int(count)}
        own["ratio"], own["ratio_quartiles"] = relative(index, 0)
    own["best"] = names[best]
    own["relative"], own["relative_quartiles"] = relative(len(names) - 1, best)
    return found


CASE = Case(
    BudgetOptions,
    run,
    {
        **{key: COLUMNS[key] for key in ("drafter", "form", "temperature", "batch")},
        "arm": ("budget", ""),
        "tau": COLUMNS["tau"],
        "verified": ("nodes per request", ".1f"),
        "step_ms": ("ms per step", ".1f"),
        "ratio": ("ratio to no drafts", ".3f"),
        "ratio_quartiles": ("quartiles", ".3f"),
        "best": ("best fixed", ""),
        "relative": ("relative to it", ".3f"),
        "relative_quartiles": ("quartiles", ".3f"),
        **{key: COLUMNS[key] for key in ("steps", "requests", "differing", "gap")},
    },
    quick={"prompts": 8, "max_tokens": 48, "rounds": 4, "temperatures": (0.0,)},
    plot=Plot("batch", ("ratio",)),
)
