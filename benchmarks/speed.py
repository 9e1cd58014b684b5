r"""Speed of trees, of vLLM's own chain of the same drafter and of n-grams, beside plain vLLM.

    python -m benchmarks enlarge tests/assets/target BIG --heads tests/assets/heads
    vllm-medusa tree HEADS --num-draft-tokens 63 --output BIG/tree.json  # calibrated
    python -m benchmarks speed BIG/target BIG/heads --tree BIG/tree.json
    python -m benchmarks speed BIG/target BIG/heads --tree BIG/tree.json --prompts 2 \
        --batch 1 2 4 8 16 32 64 --tree-sizes 2 4 7 15 31 --only "^(auto|tree|chain 5, vLLM's)" \
        --waves 3 --uneven --seconds 60  # under load
    python -m benchmarks speed BIG/target BIG/eagle3 --only "^(auto|dyn|chain 4|n-gram)"  # or Hydra

Every arm takes turns with plain vLLM on the same prompts, so that what disturbs the machine
disturbs both; the ratio is of throughputs, prefills included. The arm's tokens have to be plain's
in every round; seeded sampling included, of which vLLM's own speculation draws other numbers.

Requests that drafts bring to their end before others leave a batch that gets smaller and smaller,
which a server fills again: with --waves 3 a turn has three answers for each place of the batch.
Answers of one length end together in plain vLLM, whose next prompts are then computed at once, and
one by one with drafts; as in traffic, with --uneven each answer has a length of its own.

One engine of each arm serves all batches and temperatures, one after the other. Each begins with a
round of its own ("first"), in which an automatic budget meets that load for the first time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arms import (
    AUTOMATIC,
    PLAIN,
    Arm,
    ArmOptions,
    chain_arm,
    chosen,
    dynamic_arm,
    engine,
    ngram_arm,
    sampling,
    stock_arm,
    tree_arm,
)
from benchmarks.case import Case, Row
from benchmarks.report import draw, table
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Conversation, Engine, Request
from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import Above, Positive, option

SEED = 0
NO_BASELINE = "no baseline when sampling, see below"
WHY = (
    "vLLM's own speculation has no figures at temperatures above 0. On CPUs the rejection sampler "
    "of vLLM 0.32 is wrong in every batch that holds a sampled request, without this plugin too: "
    "greedy neighbours get wrong tokens as well, and hardly a draft is accepted (tau 1.00). "
    "Elsewhere it draws other random numbers than plain vLLM, so its tokens can't be compared. The "
    "same heads' chain through our engine stands beside it."
)


class SpeedOptions(ArmOptions):
    """What is measured."""

    chain_depths: tuple[Positive, ...] = option("chains through our engine", default=(2, 3, 4, 5))
    stock_depths: tuple[Positive, ...] = option(
        "vLLM's own chain, and ours beside it", default=(2, 5)
    )
    tree_sizes: tuple[Positive, ...] = option("draft nodes", default=(4, 7, 10, 14, 22, 32, 63))
    dynamic_sizes: tuple[Positive, ...] = option("draft nodes of dynamic trees", default=(4, 7, 14))
    ngrams: tuple[Positive, ...] = option("tokens of vLLM's n-gram lookup", default=(5,))
    only: str | None = option("regular expression of the arms' names", default=None)
    repeats: Positive = option("rounds of each arm in turn with plain vLLM", default=7)
    seconds: Above | None = option(
        "for each arm, batch and temperature: no further round that would end later", default=None
    )
    minutes: Above | None = option("in all: nothing is begun after them", default=None)
    waves: Positive = option(
        "answers of a turn for each place of the batch: from 2 on, a place whose answer has ended "
        "is taken by the next request, as in a server; with 1 the batch gets empty in the end",
        default=1,
    )
    uneven: bool = option(
        "answers of half to one and a half of --max-tokens, each of its own length", default=False
    )
    max_rows: Positive = option("arms that verify more in a step are left out", default=128)

    def num_prompts(self) -> int:
        """A turn of the largest batch at least."""
        return max(self.prompts, *(batch * self.waves for batch in self.batch))


@dataclass
class UnevenAnswer(Conversation):
    """A prompt whose answer has at most half to one and a half of ``mean`` tokens, by its index."""

    mean: int = 2

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        draw = random.Random(self.prompt.index)
        length = draw.randint(max(1, self.mean // 2), self.mean + self.mean // 2)
        return replace(super().next_request(engine), options={"max_tokens": length})


def arms(options: SpeedOptions) -> list[Arm]:
    """Those asked for; each of vLLM's chains behind ours of the same depth."""
    depths = sorted({*options.chain_depths, *options.stock_depths})
    found: list[Arm | None] = [dynamic_arm(options, "auto")]
    for depth in depths:
        found.append(chain_arm(options, depth))
        if depth in options.stock_depths:
            found.append(stock_arm(options, depth))
    found += [tree_arm(options, nodes) for nodes in options.tree_sizes]
    found += [dynamic_arm(options, nodes) for nodes in options.dynamic_sizes]
    found += [ngram_arm(tokens) for tokens in options.ngrams]
    return chosen(found, options.only)


def run(options: SpeedOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, temperature and batch."""
    prompts = options.read_prompts()
    if not options.paths():
        progress.note(
            "no tree comes with the drafter, so none is measured: heads take one with --tree"
        )
    end = time.monotonic() + 60 * (options.minutes or float("inf"))
    with engine(PLAIN, options, max(options.temperatures)) as plain:
        for arm in arms(options):
            points = []
            for what in _points(arm, options):
                if reason := _left_out(arm, what, options):
                    yield Row(what, note=reason)
                else:
                    points.append(what)
            yield from _rows(arm, points, plain, prompts, options, progress, end)


def _points(arm: Arm, options: SpeedOptions) -> Iterator[dict[str, Any]]:
    """What names the rows of an arm."""
    for batch in options.batch:
        for temperature in options.temperatures:
            of_many = f", batch {batch}" if len(options.batch) > 1 else ""
            yield {
                "name": f"{arm.name}, T {temperature:g}{of_many}",
                "temperature": temperature,
                "batch": batch,
                "arm": arm.name,
                "nodes": arm.num_draft_tokens or "as pays",
            }


def _left_out(arm: Arm, what: dict[str, Any], options: SpeedOptions) -> str:
    """Why an arm is not measured."""
    if arm.kind == "stock" and what["temperature"] > 0:
        return NO_BASELINE
    rows = what["batch"] * (1 + arm.num_draft_tokens)
    return (
        f"{rows} rows a step, --max-rows is {options.max_rows}" if rows > options.max_rows else ""
    )


def _rows(
    arm: Arm,
    points: list[dict[str, Any]],
    plain: EngineProcess,
    prompts: list[Prompt],
    options: SpeedOptions,
    progress: Progress,
    end: float,
) -> Iterator[Row]:
    """The rows of an arm by one engine, and by a new one after a failure."""
    while points:
        started = False
        if time.monotonic() > end:
            yield from (Row(what, note="--minutes were over") for what in points)
            return
        progress.note(f"{arm.name}: starting")
        try:
            with engine(arm, options, max(options.temperatures)) as process:
                started = True
                while points and time.monotonic() <= end:
                    yield _measure(points[0], plain, process, prompts, options)
                    points = points[1:]
        except Exception as error:
            failed = points[:1] if started else points
            points = points[len(failed) :]
            yield from (Row(what, failed=f"{type(error).__name__}: {error}") for what in failed)


def _measure(
    what: dict[str, Any],
    plain: EngineProcess,
    process: EngineProcess,
    prompts: list[Prompt],
    options: SpeedOptions,
) -> Row:
    temperature, batch = what["temperature"], what["batch"]
    plain.sampling = process.sampling = sampling(options, temperature)
    if options.uneven:
        plain.session = process.session = partial(UnevenAnswer, mean=options.max_tokens)
    how: dict[str, Any] = {"concurrency": batch, "seed": SEED if temperature > 0 else None}
    turn = batch * options.waves
    prompts = prompts[: max(options.prompts, turn)]
    how["turn"] = turn
    began = time.perf_counter()
    first = run_in_turn(plain, process, prompts[:turn], **how)
    left = (options.seconds or float("inf")) - (time.perf_counter() - began)
    measured = run_in_turn(plain, process, prompts, **how, rounds=options.repeats, seconds=left)
    found = measured.figures()
    ratios = found["ratios"]
    numbers = found | {
        "step_ms": _step_ms(measured.candidate, batch),
        "plain_step_ms": _step_ms(measured.baseline, batch),
        "first": first.ratio,
        "lower_quartile": _quartiles(ratios)[0],
        "upper_quartile": _quartiles(ratios)[1],
        "least_and_most": [min(ratios), max(ratios)],
        "rounds": len(ratios),
    }
    differences = first.differences + measured.differences
    reason = ""
    if differences:
        reason = (
            f"{len(differences)} of {first.requests + measured.requests} answers differ from plain "
            f"vLLM's, first {differences[0].prompt.request_id} at token {differences[0].position}"
        )
    return Row(what, numbers, right=not differences, failed=reason)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _step_ms(timed: Any, batch: int) -> float:
    """Milliseconds of a step, prefills included; each of the batch has its part in it."""
    answers = timed.acceptance.steps + len(timed.results) * len(timed.rates)
    return 1e3 * float(timed.seconds) * batch / answers if answers else 0.0


def best_beside_automatic(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load: the automatic budget, and the best of plain vLLM and all other arms."""
    measured = [row for row in rows if "ratio" in row]
    found = []
    for row in measured:
        if row["arm"] == AUTOMATIC:
            load = (row["temperature"], row["batch"])
            others = [("plain", 1.0)] + [
                (other["arm"], other["ratio"])
                for other in measured
                if other["arm"] != AUTOMATIC and (other["temperature"], other["batch"]) == load
            ]
            best, ratio = max(others, key=lambda other: other[1])
            keys = ("temperature", "batch", "ratio", "lower_quartile", "first")
            of_best = {"best": best, "its_ratio": ratio, "of_the_best": row["ratio"] / ratio}
            found.append({key: row[key] for key in keys} | of_best)
    return sorted(found, key=lambda row: (row["temperature"], row["batch"]))


def text(rows: list[dict[str, Any]]) -> str:
    """What stands under the table."""
    parts = [WHY] if any(row.get("note") == NO_BASELINE for row in rows) else []
    if beside := best_beside_automatic(rows):
        columns = {
            "temperature": ("T", "g"),
            "batch": ("batch", "d"),
            "ratio": ("automatic", ".3f"),
            "lower_quartile": ("lower quartile", ".3f"),
            "first": ("its first round", ".3f"),
            "best": ("best of the others", ""),
            "its_ratio": ("its ratio", ".3f"),
            "of_the_best": ("automatic / best", ".3f"),
        }
        parts.append("\n".join(table(beside, columns)))
    return "\n\n".join(parts)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars for one batch; for several a line for each arm and a panel for each temperature."""
    if len({row.get("batch") for row in rows}) < 2:
        draw(rows, ("ratio", "tau"), path)
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if "ratio" in row]
    names = list(dict.fromkeys(row["arm"] for row in shown))
    temperatures = sorted({row["temperature"] for row in shown})
    batches = sorted({row["batch"] for row in shown})
    figure, panels = plt.subplots(
        1, len(temperatures), figsize=(6 * len(temperatures), 4.5), squeeze=False, sharey=True
    )
    for temperature, panel in zip(temperatures, panels[0], strict=True):
        for place, name in enumerate(names):
            here = [r for r in shown if (r["arm"], r["temperature"]) == (name, temperature)]
            here.sort(key=lambda row: row["batch"])
            ratio = [row["ratio"] for row in here]
            spread = [
                [row["ratio"] - row["lower_quartile"] for row in here],
                [row["upper_quartile"] - row["ratio"] for row in here],
            ]
            width, color = (2.5, "tab:red") if name == AUTOMATIC else (1.2, f"C{place + 3}")
            x = [row["batch"] * 1.015 ** (place - len(names) / 2) for row in here]  # bars apart
            panel.errorbar(x, ratio, spread, label=name, lw=width, color=color, capsize=2)
        panel.axhline(1.0, color="black", lw=1, label="plain")
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set(title=f"T {temperature:g}", xlabel="requests in the batch")
        panel.grid(alpha=0.3)
    panels[0][0].set(ylabel="speed against plain vLLM (median, quartiles)")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


CASE = Case(
    SpeedOptions,
    run,
    {
        "temperature": ("T", "g"),
        "batch": ("batch", "d"),
        "arm": ("arm", ""),
        "nodes": ("draft nodes", ""),
        "tau": ("tau", ".2f"),
        "step_ms": ("ms a step", ".1f"),
        "plain_step_ms": ("plain's", ".1f"),
        "tokens_per_second": ("tokens/s", ".1f"),
        "ratio": ("ratio to plain", ".2f"),
        "lower_quartile": ("lower quartile", ".2f"),
        "least_and_most": ("least, most", ".2f"),
        "rounds": ("rounds", "d"),
        "first": ("first", ".2f"),
        "requests": ("answers equal to plain's", ""),
    },
    quick={
        "prompts": 4,
        "max_tokens": 48,
        "repeats": 2,
        "chain_depths": (3,),
        "stock_depths": (5,),
        "tree_sizes": (7, 14),
        "dynamic_sizes": (7,),
    },
    picture=picture,
    text=text,
)
