"""The automatic budget against fixed ones, which take turns in one engine.

    python -m benchmarks budgets --drafter DRAFTER --batch 1 4 --nodes 1 2 4 8

Engines of one configuration differ by some per cent from start to start, and machines change their
speed within seconds; here, all budgets share both. After a pass over the prompts with the automatic
budget alone, every `_TURN` steps another budget decides, in random order. It learns only in its own
turns. Steps with a prefill or without a full batch do not count, nor do the first two of a turn,
whose drafts an earlier budget requested.
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
import numpy.typing as npt

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
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import Result, run_batch
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.in_turn import Difference, difference
from vllm_medusa.options import Above, FromZero, Positive, option

_TURN = 10  # steps
_CHOSEN_BEFORE = 2  # first steps of a turn
_RESAMPLED = 1000
NONE = "no drafts"


class BudgetOptions(EngineOptions):
    """Options of the benchmark."""

    nodes: tuple[Positive, ...] = option("fixed budgets: draft nodes per request", default=(2, 4))
    lookup: bool = option("also copies from the request's own tokens", default=False)
    rounds: FromZero = option("passes over the prompts with all budgets in turn", default=5)
    seconds: Above | None = option("time limit for starting them, per load", default=None)

    def check(self) -> None:
        """See `Options.check`."""
        if not self.rounds:
            raise ValueError("rounds is 0; use at least 1.")


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
        self.budgets = {AUTOMATIC: self.scheduler.policy}
        self.budgets |= {str(nodes): FixedBudget(nodes) for nodes in (0, *self.nodes)}
        learn = self.scheduler._learn_time
        random_order = random.Random(SEED)

        def learn_and_turn(ended: Any) -> None:
            if ended is None:
                return
            step, ms = ended
            if self._step > _CHOSEN_BEFORE and not step.prefill and step.requests == self.batch:
                self.steps.append((self._turn, self._name, ms, step.tokens, step.nodes))
            learn(ended)
            if self._step in (0, _TURN):
                self._order = self._order or random_order.sample([*self.budgets], len(self.budgets))
                self._turn, self._step, self._name = self._turn + 1, 0, self._order.pop()
                self.scheduler.policy = self.budgets[self._name]
            self._step += 1

        self.scheduler._learn_time = learn_and_turn


def run(options: BudgetOptions, progress: Progress) -> Iterator[Row]:
    """A row for each load and budget; in float32 only if all tokens equal plain vLLM's."""
    options = options.ready(progress)
    form = f"{AUTOMATIC}+lookup" if options.lookup else AUTOMATIC
    arm = arm_of(options.drafter, form, 0)
    assert arm is not None
    prompts = options.all_prompts()
    for temperature in options.temperatures:
        seed = SEED if temperature else None
        progress.note(f"T {temperature:g}: plain vLLM's tokens")
        with engine(PLAIN, replace(options, temperatures=(temperature,))) as plain:
            plain.session = session(options)
            expected, _ = plain.run(prompts, max(options.batch), seed)
        for batch in options.batch:
            progress.note(f"T {temperature:g}, batch {batch}: all budgets")
            how: dict[str, Any] = {"arm": arm, "batch": batch, "temperature": temperature}
            with tempfile.TemporaryDirectory() as folder, environment(arm, options, folder):
                log = Path(folder, "log")
                found, steps = run_in_process(measure, options, progress, log=log, **how)
            right = {result.prompt.index: result for result in expected}
            pairs = [difference(right[each.prompt.index], each) for each in found]
            wrong = [each for each in pairs if each is not None]
            what = {"batch": batch, "temperature": temperature, **arm.what}
            yield from _rows(what, steps, batch, wrong, len(found), options)


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
    steps: list[tuple[int, str, float, int, int]],
    batch: int,
    wrong: list[Difference],
    requests: int,
    options: BudgetOptions,
) -> Iterator[Row]:
    checked: dict[str, Any] = {"requests": requests}
    if options.dtype != "float32":
        checked["differing"] = len(wrong)
        if wrong and not what["temperature"]:
            checked["gap"] = largest_gap(str(options.target), wrong)
        wrong = []
    reason = f"{len(wrong)} of {requests} answers differ from plain vLLM's" if wrong else ""
    names = ["0", *map(str, options.nodes), AUTOMATIC]
    for name, numbers in summarize(steps, names, batch).items():
        arm = NONE if name == "0" else name if name == AUTOMATIC else f"{name} nodes"
        load = f"batch {what['batch']}, T {what['temperature']:g}"
        row = {"name": f"{what['drafter']}, {load}, {arm}", "arm": arm, **what}
        yield Row(row, numbers | checked, right=not wrong, failed=reason)


def summarize(
    steps: list[tuple[int, str, float, int, int]], names: list[str], batch: int
) -> dict[str, dict[str, Any]]:
    """Numbers of each budget; ratios of tokens per ms to the first one's, with quartiles.

    The quartiles are of ratios of resampled turns (bootstrap).
    """
    sums: dict[str, dict[int, Any]] = {}
    for turn, name, ms, tokens, nodes in steps:
        own = sums.setdefault(name, {})
        own[turn] = own.get(turn, np.zeros(4)) + np.array([tokens, ms, nodes, 1])
    if missing := [name for name in names if name not in sums]:
        raise ValueError(f"no step of a full batch with budget {missing[0]}; use more --rounds")
    turns = {name: np.stack(list(own.values())) for name, own in sums.items()}
    rng = np.random.default_rng(SEED)

    def resampled(name: str) -> npt.NDArray[np.float64]:
        own = turns[name]
        sums = own[rng.integers(len(own), size=(_RESAMPLED, len(own)))].sum(1)
        rates: npt.NDArray[np.float64] = sums[:, 0] / sums[:, 1]
        return rates

    base, found = resampled(names[0]), {}
    first = turns[names[0]].sum(0)
    for name in names:
        tokens, ms, nodes, count = turns[name].sum(0).tolist()
        found[name] = {
            "tau": tokens / count / batch,
            "verified": nodes / count / batch,
            "step_ms": ms / count,
            "ratio": tokens / ms / (first[0] / first[1]),
            "ratio_quartiles": np.quantile(resampled(name) / base, (0.25, 0.75)).tolist(),
            "steps": int(count),
        }
    return found


def text(rows: list[dict[str, Any]]) -> str:
    """For each load: the automatic budget relative to the best fixed one."""
    lines = []
    for row in (row for row in rows if row.get("arm") == AUTOMATIC and "ratio" in row):
        keys = ("drafter", "form", "batch", "temperature")
        same = [each for each in rows if "ratio" in each and all(each[k] == row[k] for k in keys)]
        best = max((each for each in same if each is not row), key=lambda each: each["ratio"])
        load = f"Batch {row['batch']}, T {row['temperature']:g}"
        lines.append(f"- {load}: {row['ratio'] / best['ratio']:.3f} of the best ({best['arm']}).")
    return "\n".join(["The automatic budget relative to the best fixed one:", "", *lines])


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
        **{key: COLUMNS[key] for key in ("steps", "requests", "differing", "gap")},
    },
    quick={"prompts": 4, "max_tokens": 48, "rounds": 4, "temperatures": (0.0,)},
    plot=Plot("batch", ("ratio",)),
)
