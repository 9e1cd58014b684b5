"""Draft messages between workers and the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from vllm_medusa.budget.expected_acceptance import Drafted
from vllm_medusa.integration.requests import GREEDY_BELOW, follows_grammar
from vllm_medusa.integration.scheduling.grammar import Candidates


@dataclass
class DraftMessage(DraftTokenIds):
    """Drafts from a worker with trees: vLLM's message plus their survivals."""

    # survival of each draft, not increasing; empty if trees are static
    survival: list[list[float]] = field(default_factory=list)
    # for requests with a grammar, whose ``draft_token_ids`` are empty
    candidates: dict[str, Candidates] = field(default_factory=dict)
    # origin of each draft, see `DraftTrees.source`, for requests with copies
    proposed_by: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Draft(Drafted):
    """Drafts of a request, kept until the step that may verify them ends."""

    request: Request = field(kw_only=True)  # its id may be reused later
    token_ids: list[int] = field(default_factory=list)  # best first; empty if only on the device
    parents: list[int] | None = None  # parent node of each, if the request has a grammar
    constrained: bool = False  # whether the grammar has started
    run: list[tuple[int, int]] = field(default_factory=list)  # forced tokens, and their kinds

    def __post_init__(self) -> None:
        params = self.request.sampling_params
        sampled = params is None or params.temperature >= GREEDY_BELOW
        self.kind = int(sampled) + 2 * follows_grammar(params)

    def keep(self, count: int) -> None:
        """Drop all but the best ``count`` drafts."""
        self.token_ids, self.survival = self.token_ids[:count], self.survival[:count]
        if self.copied is not None:
            self.copied = self.copied[:count]
        self.limit = count if self.limit is None else min(self.limit, count)


def skips_lookup(scheduler_output: SchedulerOutput) -> bool:
    """Whether a worker should not search for copies after this step."""
    return getattr(scheduler_output, "skips_lookup", False)


def tree_parents(scheduler_output: SchedulerOutput) -> Mapping[str, list[int]]:
    """The topologies of requests with a grammar: the parent of each draft of the step."""
    return getattr(scheduler_output, "tree_parents", {})
