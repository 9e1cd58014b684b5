"""Where a decode step goes: target forward, heads, verification, compaction, vLLM itself.

    python -m benchmarks profile BIG/target BIG/heads --tree BIG/tree.json --nodes 10

Plain vLLM, our tree and vLLM's own Medusa chain, each in a process of its own, one after another.
What a tree costs comes in two parts: the *own overhead*, work that plain decoding does not have
(heads, verification, compaction, bookkeeping of trees), and the forward pass over several rows
instead of one, which is reported against plain's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import (
    PLAIN,
    Arm,
    ArmOptions,
    chain_arm,
    chosen,
    environment,
    sampling,
    settings,
    stock_arm,
    tree_arm,
)
from benchmarks.case import Case, Row, attempt
from benchmarks.spans import OWN, hook_engine
from benchmarks.speed import NO_BASELINE, SEED, WHY
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import Delta
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.options import Positive, option

FORWARD = ("forward without attention", "attention", "LM head")
Step = tuple[float, bool, dict[str, float]]  # seconds, is a decode step, seconds of its parts


class ProfileOptions(ArmOptions):
    """What is measured."""

    nodes: tuple[Positive, ...] = option("draft nodes of our trees", default=(10,))
    chain_depths: tuple[Positive, ...] = option("chains through our engine", default=(5,))
    stock_depths: tuple[Positive, ...] = option("vLLM's own chain", default=(5,))
    only: str | None = option(
        "regular expression of the arms' names; plain always runs", default=None
    )

    def check(self) -> None:
        """See `Options.check`."""
        if len(self.batch) != 1:
            raise ValueError("a profile is of one --batch.")


def run(options: ProfileOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm and temperature; one whose tokens are not plain's has no figures."""
    arms: list[Arm | None] = [tree_arm(options, nodes) for nodes in options.nodes]
    arms += [chain_arm(options, depth) for depth in options.chain_depths]
    arms += [stock_arm(options, depth) for depth in options.stock_depths]
    for temperature in options.temperatures:
        answers, plain = _in_a_process(PLAIN, options, temperature)
        for arm in [PLAIN, *chosen(arms, options.only)]:
            what = {"name": f"{arm.name}, T {temperature:g}", "temperature": temperature}
            what["arm"] = arm.name
            if arm.kind == "stock" and temperature > 0:
                yield Row(what, note=NO_BASELINE)
                continue

            def measure(
                arm: Arm = arm,
                what: dict[str, Any] = what,
                temperature: float = temperature,
                wanted: dict[str, list[int]] = answers,
                plain: dict[str, float] = plain,
            ) -> Row:
                found, parts = wanted, plain
                if arm is not PLAIN:
                    found, parts = _in_a_process(arm, options, temperature)
                wrong = sum(found[name] != ids for name, ids in wanted.items())
                reason = f"{wrong} of {len(wanted)} answers differ from plain vLLM's"
                numbers = summarise(parts, plain) | {"parts_ms": parts}
                return Row(what, numbers, right=not wrong, failed=reason if wrong else "")

            progress.note(f"{what['name']}")
            yield attempt(what, measure)


def _in_a_process(
    arm: Arm, options: ProfileOptions, temperature: float
) -> tuple[dict[str, list[int]], dict[str, float]]:
    how: dict[str, Any] = {"arm": arm, "temperature": temperature}
    with environment(arm, options), tempfile.NamedTemporaryFile() as log:
        return run_in_process(profile_arm, options, log=Path(log.name), **how)


def profile_arm(
    options: ProfileOptions, *, arm: Arm, temperature: float, progress: Progress = SILENT
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Run the prompts to warm up, then again; token ids by prompt, milliseconds by part."""
    from vllm_medusa.config import run_engines_in_this_process

    run_engines_in_this_process()
    from vllm_medusa.offline.batch import run_batch
    from vllm_medusa.offline.engine import VllmEngine

    engine = VllmEngine(
        settings(arm, options), sampling(options, temperature), seeded=temperature > 0
    )
    how: dict[str, Any] = {"concurrency": options.batch[0], "seed": SEED if temperature else None}
    prompts = options.read_prompts()
    list(run_batch(prompts, engine, **how))
    steps: list[Step] = []
    _record(engine, steps)
    results = list(run_batch(prompts, engine, **how))
    if refused := next((result.error for result in results if result.error), None):
        raise ValueError(refused)
    tokens = {r.prompt.request_id: r.answers[0].token_ids for r in results}
    return tokens, average_parts(steps)


def _record(engine: Any, steps: list[Step]) -> None:
    """Have every step of an engine noted in ``steps``."""
    spans, step = hook_engine(engine.llm), engine.step
    begun: set[str] = set()

    def recorded() -> list[Delta]:
        start = time.perf_counter()
        deltas: list[Delta] = step()
        seconds = time.perf_counter() - start
        first = {delta.key for delta in deltas} - begun
        begun.update(first)
        steps.append((seconds, bool(deltas) and not first, spans.take()))
        return deltas

    engine.step = recorded


def average_parts(steps: Sequence[Step]) -> dict[str, float]:
    """Mean milliseconds of each part over the middle half, by duration, of the decode steps.

    The middle half, because a stall of the machine would otherwise be blamed on whatever part it
    hit; a mean, because then the parts add up to the step.
    """
    decode = sorted((step for step in steps if step[1]), key=lambda step: step[0])
    middle = decode[len(decode) // 4 : max(1, 3 * len(decode) // 4)]
    labels = {label for _, _, parts in middle for label in parts}
    return {
        label: 1e3 * sum(parts.get(label, 0.0) for _, _, parts in middle) / len(middle)
        for label in labels
    }


def summarise(parts: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """Totals in milliseconds and shares of the step."""
    step = sum(parts.values())
    own = sum(parts.get(label, 0.0) for label in OWN)
    forward = sum(parts.get(label, 0.0) for label in FORWARD)
    plain_forward = sum(plain.get(label, 0.0) for label in FORWARD)
    beyond = step - forward - (sum(plain.values()) - plain_forward)
    return {
        "step_ms": step,
        "target_forward_ms": forward,
        "target_forward_ratio": forward / plain_forward,
        "own_overhead_ms": own,
        "own_overhead_share": own / step,
        "beyond_plain_ms": beyond,
        "beyond_plain_share": beyond / step,
    }


def parts_tables(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each part by arm, largest first, a table for each temperature."""
    lines = []
    measured = [row for row in rows if "parts_ms" in row]
    for temperature in dict.fromkeys(row["temperature"] for row in measured):
        arms = {r["arm"]: r["parts_ms"] for r in measured if r["temperature"] == temperature}
        most: dict[str, float] = {}
        for parts in arms.values():
            most |= {label: max(ms, most.get(label, 0.0)) for label, ms in parts.items()}
        lines += [f"| ms a step, T {temperature:g} | {' | '.join(arms)} |"]
        lines += ["|---" * (len(arms) + 1) + "|"]
        for label in sorted(most, key=lambda label: -most[label]):
            cells = [f"{p[label]:.3f}" if label in p else "-" for p in arms.values()]
            lines.append(f"| {label}{' (own)' * (label in OWN)} | {' | '.join(cells)} |")
        lines.append("")
    noted = any(row.get("note") == NO_BASELINE for row in rows)
    return "\n".join([*lines, *([WHY] if noted else [])])


CASE = Case(
    ProfileOptions,
    run,
    {
        "temperature": ("T", "g"),
        "arm": ("arm", ""),
        "step_ms": ("ms a step", ".2f"),
        "target_forward_ms": ("target forward ms", ".2f"),
        "target_forward_ratio": ("to plain's", ".2f"),
        "own_overhead_share": ("own overhead", ".1%"),
        "beyond_plain_share": ("beyond plain", ".1%"),
    },
    quick={"prompts": 2, "max_tokens": 32},
    text=parts_tables,
)
