"""Speed of tree Medusa, of vLLM's own Medusa chain and of n-grams, each beside plain vLLM.

    python -m benchmarks enlarge demo/target BIG --heads demo/heads
    vllm-medusa tree HEADS --num-draft-tokens 63 --output BIG/tree.json  # demo/heads, calibrated
    python -m benchmarks speed BIG/target BIG/heads --tree BIG/tree.json

Every arm takes turns with plain vLLM on the same prompts, so that what disturbs the machine
disturbs both; the ratio is of throughputs, prefills included. The arm's tokens have to be plain's
in every round; seeded sampling included, of which vLLM's own speculation draws other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.arms import (
    PLAIN,
    Arm,
    ArmOptions,
    chain_arm,
    chosen,
    dynamic_arm,
    engine,
    ngram_arm,
    stock_arm,
    tree_arm,
)
from benchmarks.case import Case, Row, attempt
from vllm_medusa.job import Progress
from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import Positive, option

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
    repeats: Positive = option("rounds of each arm in turn with plain vLLM", default=3)


def arms(options: SpeedOptions) -> list[Arm]:
    """Those asked for; each of vLLM's chains behind ours of the same depth."""
    depths = sorted({*options.chain_depths, *options.stock_depths})
    found: list[Arm | None] = []
    for depth in depths:
        found.append(chain_arm(options, depth))
        if depth in options.stock_depths:
            found.append(stock_arm(options, depth))
    found += [tree_arm(options, nodes) for nodes in options.tree_sizes]
    found += [dynamic_arm(options, nodes) for nodes in options.dynamic_sizes]
    found.append(dynamic_arm(options, "auto"))
    found += [ngram_arm(tokens) for tokens in options.ngrams]
    return chosen(found, options.only)


def run(options: SpeedOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm and temperature."""
    prompts = options.read_prompts()
    if not options.paths():
        progress.note("the heads bring no tree, so none is measured: give one with --tree")
    for temperature in options.temperatures:
        with engine(PLAIN, options, temperature) as plain:
            for arm in arms(options):
                what = {
                    "name": f"{arm.name}, T {temperature:g}",
                    "temperature": temperature,
                    "arm": arm.name,
                    "nodes": arm.num_draft_tokens or "as pays",
                }
                if arm.kind == "stock" and temperature > 0:
                    yield Row(what, note=NO_BASELINE)
                    continue
                progress.note(f"{what['name']}: starting")
                yield attempt(
                    what,
                    lambda w=what, a=arm: _measure(w, a, plain, prompts, options),  # type: ignore[misc]
                )


def _measure(
    what: dict[str, Any],
    arm: Arm,
    plain: EngineProcess,
    prompts: list[Prompt],
    options: SpeedOptions,
) -> Row:
    temperature = what["temperature"]
    with engine(arm, options, temperature) as process:
        measured = run_in_turn(
            plain,
            process,
            prompts,
            concurrency=options.batch,
            seed=SEED if temperature > 0 else None,
            rounds=options.repeats,
            warm_up=True,
        )
    found = measured.figures()
    numbers = found | {
        "step_ms": _step_ms(measured.candidate, options.batch),
        "plain_step_ms": _step_ms(measured.baseline, options.batch),
        "least_and_most": [min(found["ratios"]), max(found["ratios"])],
    }
    reason = ""
    if not found["identical"]:
        first = found["differences"][0]
        reason = (
            f"{found['differing_requests']} of {found['requests']} answers differ from plain "
            f"vLLM's, first {first['request_id']} at token {first['position']}"
        )
    return Row(what, numbers, right=found["identical"], failed=reason)


def _step_ms(timed: Any, batch: int) -> float:
    """Milliseconds of a step, prefills included; each of the batch has its part in it."""
    answers = timed.acceptance.steps + len(timed.results) * len(timed.rates)
    return 1e3 * float(timed.seconds) * batch / answers if answers else 0.0


CASE = Case(
    SpeedOptions,
    run,
    {
        "temperature": ("T", "g"),
        "arm": ("arm", ""),
        "nodes": ("draft nodes", ""),
        "tau": ("tau", ".2f"),
        "step_ms": ("ms a step", ".1f"),
        "plain_step_ms": ("plain's", ".1f"),
        "tokens_per_second": ("tokens/s", ".1f"),
        "ratio": ("ratio to plain", ".2f"),
        "least_and_most": ("least, most", ".2f"),
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
    bars=("ratio", "tau"),
    text=lambda rows: WHY if any(row.get("note") == NO_BASELINE for row in rows) else "",
)
