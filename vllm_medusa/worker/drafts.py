"""Draft messages between workers and the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from vllm_medusa.budget.acceptance import Drafted
from vllm_medusa.worker.grammar import Candidates
from vllm_medusa.worker.requests import GREEDY_BELOW, follows_grammar


@dataclass
class TreeDrafts(DraftTokenIds):
    """Drafts that a worker with trees sends: vLLM's, with their survivals."""

    # of each draft, not increasing; empty if trees are static
    survival: list[list[float]] = field(default_factory=list)
    # for requests that follow a grammar, which have no drafts above
    candidates: dict[str, Candidates] = field(default_factory=dict)
    # who proposed each draft, see `DraftTrees.source`, for requests with any that was copied
    proposed_by: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Draft(Drafted):
    """Drafts of a request, kept until the step that could verify them ends.

    Attributes:
        request: their request; its id may have been reused since.
        token_ids: of all drafts, best first; empty if they are only on the device.
        parents: of each, if the request follows a grammar: its parent's node.
        constrained: the grammar has begun.
        run: tokens and kinds of the drafts that the grammar forces.

    """

    request: Request = field(kw_only=True)
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    constrained: bool = False
    run: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        sampled = params is None or params.temperature >= GREEDY_BELOW
        self.kind = int(sampled) + 2 * follows_grammar(params)


def tree_parents(scheduler_output: SchedulerOutput) -> Mapping[str, list[int]]:
    """The topologies of requests that follow a grammar: the parent of each draft of the step."""
    return getattr(scheduler_output, "tree_parents", {})


def survival_of(log_survival: npt.NDArray[np.float32]) -> list[list[float]]:
    """The survivals of each request's drafts, [B, K], that can survive at all; they come first."""
    return [np.exp(row[np.isfinite(row)]).tolist() for row in log_survival]
