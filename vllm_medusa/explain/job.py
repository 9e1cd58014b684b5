"""From the step costs that engines left on disk to what a budget would choose at each load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.budget.acceptance import USUAL_TAUS, Acceptance
from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.policy import START, Auto
from vllm_medusa.budget.store import Kept, kept_costs
from vllm_medusa.calibration.pictures import check_picture
from vllm_medusa.config import vllm_cache
from vllm_medusa.explain.measure import measure
from vllm_medusa.explain.options import ExplainOptions
from vllm_medusa.explain.picture import draw_explanation
from vllm_medusa.heads import peek_heads

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class NoCosts(ValueError):
    """No step costs are kept for what was asked for; the message says how to get them."""


@dataclass(frozen=True)
class Load:
    """What is expected with so many requests at a time.

    Attributes:
        requests: that decode.
        plain_ms: of a step without drafts.
        nodes: the best number of draft nodes, from 1, of all requests together.
        tokens: of a step with them.
        ms: of a step with them.
        ratio: speed with them against plain steps.

    """

    requests: int
    plain_ms: float
    nodes: int
    tokens: float
    ms: float
    ratio: float

    @property
    def pays(self) -> bool:
        """Whether the budget would begin to draft; else nothing is drafted but for tries."""
        return self.ratio > START


@dataclass(frozen=True)
class Explanation:
    """What is kept, and what follows from it.

    Attributes:
        kept: the step costs.
        others: as many as are kept for other engines with the same target and heads.
        calibrated: whether the heads say what their nodes bring; else the usual is taken.
        loads: what is expected, by requests.
        rows: numbers of rows, for the curves.
        plain_ms: [rows] steps of as many requests without drafts.
        tree_ms: [rows] steps of a request with a tree of so many nodes, root included.

    """

    kept: Kept
    others: tuple[Kept, ...]
    calibrated: bool
    loads: tuple[Load, ...]
    rows: tuple[int, ...]
    plain_ms: tuple[float, ...]
    tree_ms: tuple[float, ...]


def explain(options: ExplainOptions) -> Explanation:
    """Look up the step costs and predict.

    Raises:
        NoCosts: there are none for this.
        HeadsError: what is named as heads is none.
        CalibrationError: no picture can be drawn there.
        EngineRefused: no engine can be started to measure.

    """
    if options.plot is not None:
        check_picture(options.plot)
    if options.costs is not None and not options.costs.exists():
        raise NoCosts(
            f"--costs {options.costs}: there is no such file or folder. Name one that an engine "
            "wrote, or leave the option out for vLLM's cache."
        )
    taus = peek_heads(options.heads).taus
    if options.measure:
        measure(options)
    kept, others = _find(options)
    loads = expected_loads(kept.cost, taus, options.num_speculative_tokens)
    most = min(kept.cost.max_rows, 2 * (1 + options.num_speculative_tokens))
    rows = sorted({round(2 ** (i / 4)) for i in range(4 * most.bit_length())} & {*range(most)})
    found = Explanation(
        kept,
        others,
        bool(taus),
        tuple(loads),
        tuple(rows),
        tuple(float(kept.cost.ms(n, n, 0.0)) for n in rows),
        tuple(float(kept.cost.ms(n, 1, float(n > 1))) for n in rows),
    )
    if options.plot is not None:
        draw_explanation(options.plot, found)
    return found


def expected_loads(
    cost: StepCost,
    taus: Sequence[float],
    most: int,
    loads: Sequence[int] = LOADS,
) -> list[Load]:
    """What a budget that knows this and nothing else expects, as far as steps can have the rows.

    Args:
        cost: of steps.
        taus: tokens of a step with 1, 2, .. draft nodes; empty: the usual.
        most: draft nodes of a request.
        loads: numbers of requests.

    """
    found = []
    for requests in loads:
        room = cost.max_rows - requests
        if room < 1:
            break
        policy = Auto(cost, Acceptance(taus or USUAL_TAUS), most)
        plan = policy.plan(requests, room)
        ms = float(cost.ms(requests + plan.nodes, requests, policy.share_of(plan.limit)))
        plain_ms = cost.plain_ms(requests)
        found.append(Load(requests, plain_ms, plan.nodes, plan.rate * ms, ms, plan.ratio))
    return found


def _find(options: ExplainOptions) -> tuple[Kept, tuple[Kept, ...]]:
    """The latest step costs that fit, and all others of the same target and heads."""
    place = options.costs or vllm_cache() / "medusa"
    ours = [
        kept
        for kept in kept_costs(place)
        if _same(options.target, kept.of.get("target"))
        and _same(options.heads, kept.of.get("heads"))
    ]
    wanted = options.measured.wanted().items()
    fitting = [kept for kept in ours if wanted <= {"lookup": "False", **kept.of}.items()]
    if not fitting:
        raise NoCosts(_remedy(options, place, ours))
    return fitting[0], tuple(kept for kept in ours if kept is not fitting[0])


def _remedy(options: ExplainOptions, place: Path, ours: Sequence[Kept]) -> str:
    asked = ", ".join(f"{name} {value}" for name, value in options.measured.wanted().items())
    text = (
        f"{place} has no step costs of {options.target} with {options.heads}"
        f"{f' and {asked}' if asked else ''}. An engine whose budget is auto measures them when it "
        "first starts: serve or generate once with the engine options you will use, or have it "
        "done here: --measure."
    )
    if ours:
        text += " There are some of " + "; of ".join(in_words(kept) for kept in ours) + "."
    return text


def in_words(kept: Kept) -> str:
    """What step costs are of, target and heads aside."""
    of = dict(kept.of)
    words = [
        of.pop("dtype", "?").removeprefix("torch."),
        "eager" if of.pop("eager", "") == "True" else "compiled",
        f"runner {of.pop('runner', '?')}",
        *(["lookup"] if of.pop("lookup", None) else []),
    ]
    cpus, _, bound = of.pop("threads", "").partition(" ")
    if cpus:
        words.append(f"{cpus} CPUs (threads bound to {bound})")
    for name in ("target", "heads"):
        of.pop(name, None)
    return ", ".join([*words, *(f"{key} {of[key]}" for key in of if of[key] not in ("None", "1"))])


def _same(given: str, kept: str | None) -> bool:
    """Whether two names are of one model; a folder has many."""
    if kept is None or given == kept:
        return given == kept
    return os.path.exists(given) and os.path.realpath(given) == os.path.realpath(kept)
