"""What the records say about what was asked for: met, not met, or not measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import Record

STEP_RATIO = 1.15  # of a step of 64 nodes to a plain step, at batch 1
FLOOR_FRACTION = 0.8  # of the bandwidth floor, from this context on
LONG_CONTEXT = 4096
NEAR_BEST = 1.1  # what `tiles` chose, over the best of the sweep
CHECKS = ("attention", "kernels", "decode", "vllm")

Parts = Mapping[str, Sequence[Record]]


def verdicts(parts: Parts) -> list[Record]:
    """One for each claim; "verdict" is "met", "not met" or "not measured"."""
    return [
        *(_checked(part, parts[part]) for part in CHECKS if part in parts),
        _floor(parts.get("speed", ())),
        _flash(parts.get("speed", ())),
        *_steps(parts.get("step", ())),
        _tiles(parts.get("tiles", ())),
    ]


def measured(records: Iterable[Record]) -> list[Record]:
    """Those whose result was right: no other time counts."""
    return [record for record in records if record["status"] == "passed"]


def _verdict(claim: str, met: bool | None, text: str) -> Record:
    word = {True: "met", False: "not met", None: "not measured"}[met]
    return {"claim": claim, "verdict": word, "text": text}


def _checked(part: str, records: Sequence[Record]) -> Record:
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for record in records:
        counts[record["status"]] += 1
    bad = counts["failed"] + counts["error"]
    met = None if not counts["passed"] and not bad else not bad
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if met is None and records:
        text += f": {records[0].get('reason', '')}"
    return _verdict(f"{part}: every case is right", met, text)


def fraction(record: Record, name: str = "ours") -> float | None:
    """The bandwidth floor over a time; 1 is as fast as memory can be read."""
    floor, time = record.get("floor_us"), record.get(f"{name}_us")
    return floor / time if floor and time else None


def bound_by_arithmetic(record: Record) -> bool:
    """Whether the products alone take longer than the floor allows."""
    floor, arithmetic = record.get("floor_us"), record.get("arithmetic_us")
    return bool(floor and arithmetic and arithmetic > floor / FLOOR_FRACTION)


def _floor(records: Sequence[Record]) -> Record:
    claim = f"attention reaches {FLOOR_FRACTION:.0%} of the floor, contexts of 4k and more"
    long = [r for r in measured(records) if r["context"] >= LONG_CONTEXT and not r["planned"]]
    pairs = [(value, r) for r in long if (value := fraction(r)) is not None]
    if not pairs:
        return _verdict(claim, None, "no time")
    met = [r for value, r in pairs if value >= FLOOR_FRACTION]
    reachable = [(value, r) for value, r in pairs if not bound_by_arithmetic(r)]
    text = f"{len(met)} of {len(pairs)} shapes"
    if reachable:
        worst, where = min(reachable, key=lambda pair: pair[0])
        within = sum(value >= FLOOR_FRACTION for value, _ in reachable)
        text += (
            f"; {within} of the {len(reachable)} that arithmetic does not forbid; worst of those "
            f"{worst:.0%} at {where['name']}"
        )
    return _verdict(claim, len(met) == len(pairs), text)


def _flash(records: Sequence[Record]) -> Record:
    claim = "attention is no slower than FlashAttention without a tree (torch, contiguous cache)"
    ratios = [
        r["ours_us"] / r["flash_us"]
        for r in measured(records)
        if r.get("flash_us") and r["context"] >= LONG_CONTEXT and not r["planned"]
    ]
    if not ratios:
        return _verdict(claim, None, "no time")
    middle = math.exp(statistics.fmean(map(math.log, ratios)))
    text = f"ours / flash: mean {middle:.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    return _verdict(claim, middle <= 1, f"{text}, {len(ratios)} shapes of 4k and more")


def _steps(records: Sequence[Record]) -> list[Record]:
    found = []
    for record in measured(records):
        step = _of_nodes(record, 64)
        if record["batch"] != 1 or step is None:
            continue
        for kind, key in (("own LM heads", "ratio"), ("the target's LM head", "ratio_shared")):
            claim = f"64 nodes cost at most {STEP_RATIO} of a plain step: {record['name']}, {kind}"
            found.append(_verdict(claim, step[key] <= STEP_RATIO, f"{step[key]:.3f}"))
    if not found:
        claim = f"64 nodes cost at most {STEP_RATIO} of a plain step at batch 1"
        return [_verdict(claim, None, "no time")]
    return found


def _of_nodes(record: Record, nodes: int) -> dict[str, Any] | None:
    return next((step for step in record["steps"] if step["nodes"] == nodes), None)


def _tiles(records: Sequence[Record]) -> Record:
    claim = f"`tiles` chooses within {NEAR_BEST - 1:.0%} of the best that was tried"
    timed = [r for r in measured(records) if "chosen_over_best" in r]
    if not timed:
        return _verdict(claim, None, "no time")
    worst = max(timed, key=lambda r: r["chosen_over_best"])
    near = sum(r["chosen_over_best"] <= NEAR_BEST for r in timed)
    text = (
        f"{near} of {len(timed)} shapes; worst {worst['chosen_over_best']:.2f} at {worst['name']}"
    )
    return _verdict(claim, near == len(timed), text)
