"""Time per part of a decode step: target forward, heads, verification, compaction, vLLM itself.

    python -m benchmarks profile --nodes 10

Plain vLLM, our trees and vLLM's own chain, each in its own process, one after another. The
cost of a tree has two parts: the *own overhead*, work that plain decoding does not have (heads,
verification, compaction, bookkeeping of trees), and the forward pass over several rows instead of
one, which is reported relative to plain vLLM's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Row, attempt
from benchmarks.compare import Form, arm_of
from benchmarks.engines import (
    PLAIN,
    SAMPLED_STOCK,
    SEED,
    Arm,
    ArmSampling,
    EngineOptions,
    environment,
    explain_notes,
    settings,
)
from benchmarks.spans import OWN, hook_engine
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import Delta, run_batch
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.engine import VllmEngine
from vllm_medusa.options import Positive, option

FORWARD = ("forward without attention", "attention", "LM head")
Step = tuple[float, bool, dict[str, float]]  # seconds, is a decode step, seconds of its parts
Profile = tuple[dict[int, list[int]], dict[str, float]]  # token ids by prompt, ms by part


class ProfileOptions(EngineOptions):
    """Options of the benchmark."""

    forms: tuple[Form, ...] = option(default=("automatic", "dynamic", "chain", "stock"))
    nodes: Positive = option("draft nodes per tree", default=10)
    chain: Positive = option("draft tokens per chain", default=3)

    def check(self) -> None:
        """See `Options.check`."""
        if len(self.batch) != 1:
            raise ValueError("a profile needs a single --batch.")


def run(options: ProfileOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm and temperature; in float32 only if its tokens equal plain vLLM's."""
    options = options.ready(progress)
    sizes = {"automatic": 0, "chain": options.chain, "stock": options.chain}
    arms = [arm_of(options.drafter, form, sizes.get(form, options.nodes)) for form in options.forms]
    for temperature in options.temperatures:
        plain = _in_a_process(PLAIN, options, temperature)
        for arm in filter(None, [PLAIN, *arms]):
            name = f"{arm.name}, T {temperature:g}"
            what = {"name": name, "temperature": temperature, "arm": arm.name}
            progress.note(name)
            if arm.stock and temperature > 0:
                yield Row(what, note=SAMPLED_STOCK)
            else:
                yield attempt(what, partial(_measure, what, arm, options, temperature, plain))


def _measure(
    what: dict[str, Any], arm: Arm, options: ProfileOptions, temperature: float, plain: Profile
) -> Row:
    tokens, parts = plain if arm is PLAIN else _in_a_process(arm, options, temperature)
    wrong = sum(tokens[index] != ids for index, ids in plain[0].items())
    reason = f"{wrong} of {len(tokens)} answers differ from plain vLLM's"
    numbers = summarize(parts, plain[1]) | {"parts_ms": parts}
    if options.dtype != "float32":
        numbers["differing"], wrong = wrong, 0
    return Row(what, numbers, right=not wrong, failed=reason if wrong else "")


def _in_a_process(arm: Arm, options: ProfileOptions, temperature: float) -> Profile:
    how: dict[str, Any] = {"arm": arm, "temperature": temperature}
    with tempfile.TemporaryDirectory() as folder, environment(arm, options, folder):
        return run_in_process(profile_arm, options, log=Path(folder, "log"), **how)


def profile_arm(
    options: ProfileOptions, *, arm: Arm, temperature: float, progress: Progress = SILENT
) -> Profile:
    """Run the prompts to warm up, then again."""
    from vllm_medusa.config import run_engines_in_this_process

    run_engines_in_this_process()
    sampling = ArmSampling(options.max_tokens, temperature)
    engine = VllmEngine(settings(arm, options), sampling, seeded=temperature > 0)
    how: dict[str, Any] = {"concurrency": options.batch[0], "seed": SEED if temperature else None}
    prompts = options.all_prompts()
    list(run_batch(prompts, engine, **how))
    steps: list[Step] = []
    _record(engine, steps)
    results = list(run_batch(prompts, engine, **how))
    if refused := next((result.error for result in results if result.error), None):
        raise ValueError(refused)
    tokens = {r.prompt.index: r.answers[0].token_ids for r in results}
    return tokens, average_parts(steps)


def _record(engine: Any, steps: list[Step]) -> None:
    """Append each later step of the engine to ``steps``."""
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

    Only the middle half, because otherwise a stall of the machine would be attributed to one part;
    a mean, so that the parts add up to the step.
    """
    decode = sorted((step for step in steps if step[1]), key=lambda step: step[0])
    middle = decode[len(decode) // 4 : max(1, 3 * len(decode) // 4)]
    labels = {label for _, _, parts in middle for label in parts}
    return {
        label: 1e3 * sum(parts.get(label, 0.0) for _, _, parts in middle) / len(middle)
        for label in labels
    }


def summarize(parts: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
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
        largest: dict[str, float] = {}
        for parts in arms.values():
            largest |= {label: max(ms, largest.get(label, 0.0)) for label, ms in parts.items()}
        lines += [f"| ms per step, T {temperature:g} | {' | '.join(arms)} |"]
        lines += ["|---" * (len(arms) + 1) + "|"]
        for label in sorted(largest, key=lambda label: -largest[label]):
            cells = [f"{p[label]:.3f}" if label in p else "-" for p in arms.values()]
            lines.append(f"| {label}{' (own)' * (label in OWN)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, explain_notes(rows)]).rstrip()


CASE = Case(
    ProfileOptions,
    run,
    {
        "temperature": ("T", "g"),
        "arm": ("arm", ""),
        "step_ms": ("ms per step", ".2f"),
        "target_forward_ms": ("target forward ms", ".2f"),
        "target_forward_ratio": ("relative to plain vLLM's", ".2f"),
        "own_overhead_share": ("own overhead", ".1%"),
        "beyond_plain_share": ("beyond plain", ".1%"),
        "differing": ("answers that differ (not float32)", "d"),
    },
    quick={"prompts": 2, "max_tokens": 32},
    text=parts_tables,
)
