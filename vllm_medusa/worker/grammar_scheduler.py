"""Schedulers that draft for requests which follow a grammar: what is allowed, and its masks.

A worker proposes candidates for such a request, in a list of its own that vLLM's schedulers never
see. Here the grammar chooses among them, before their number is decided, and what is scheduled
goes to the workers with its topology (`tree_parents` of the step). The masks of the step are
vLLM's at every root and follow the grammar down the tree from there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_medusa.worker.depths import DepthScheduler
from vllm_medusa.worker.grammar import Candidates, choose, fill_masks

_SHARE = 0.1  # of a step's time that its drafts' masks may take
_NEWS = 0.1  # weight of the latest step in what they are known to take


@dataclass
class TreeDrafts(DraftTokenIds):
    """What a worker with trees sends: vLLM's drafts, and what they are worth."""

    # of each draft, not increasing; empty if trees are static
    survival: list[list[float]] = field(default_factory=list)
    # for requests that follow a grammar, which have no drafts above
    candidates: dict[str, Candidates] = field(default_factory=dict)
    # who proposed each draft, see `lookup.merge`, for requests with any that was copied
    proposed_by: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Offer:
    """Drafts of a request that wait to be scheduled."""

    token_ids: list[int]
    parents: list[int]
    constrained: bool  # the grammar has begun


def tree_parents(scheduler_output: SchedulerOutput) -> Mapping[str, list[int]]:
    """The topologies of requests that follow a grammar: the parent of each draft of the step."""
    return getattr(scheduler_output, "tree_parents", {})


class GrammarScheduler(DepthScheduler, Scheduler):
    """Schedules as vLLM does, with drafts and masks along every branch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offers: dict[str, Offer] = {}
        self._fill_time = self._step_time = 0.0  # seconds, of a node's mask and of a step
        self._started = 0.0  # seconds, the step
        self._masks: Tensor | None = None  # int32 [rows of a step or more, ceil(V / 32)]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; the workers are told the topologies that they can't know."""
        self._started = time.perf_counter()
        output: Any = super().schedule(*args, **kwargs)
        if self._offers:
            output.tree_parents = {
                req_id: offer.parents[: len(tokens)]
                for req_id, tokens in output.scheduled_spec_decode_tokens.items()
                if (offer := self._offers.get(req_id)) is not None
                and offer.token_ids[: len(tokens)] == tokens  # else placeholders of vLLM's
            }
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        """Take a step's time, if masks are to be weighed against it; the rest is vLLM's."""
        result = super().update_from_output(scheduler_output, *args)
        if scheduler_output.has_structured_output_requests:
            took = time.perf_counter() - self._started
            self._step_time = _followed(self._step_time, took)
        return result

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take what the grammars allow of static trees."""
        chosen = self.choose(draft_token_ids)
        drafts = [
            chosen[req_id].token_ids if req_id in chosen else tokens
            for req_id, tokens in zip(
                draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
            )
        ]
        self.offer(draft_token_ids.req_ids, drafts, chosen)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Take the drafts that a step scheduled ahead verifies already; masks tell what counts."""
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        given: Mapping[str, Candidates] = getattr(draft_token_ids, "candidates", {})
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        parents: dict[str, list[int]] = {}
        for req_id, candidates in given.items():
            request = self.requests.get(req_id)
            count = len(scheduled.get(req_id, ()))
            if not count or request is None or not request.use_structured_output:
                continue
            drafts, constrained = candidates.first(count), self._is_constrained(request)
            # vLLM gives what may not count as -1s at the end
            known = count if constrained else self._before_the_end(request, drafts)
            tokens = drafts.token_ids[:known]
            scheduled[req_id] = tokens + [-1] * (count - known)
            parents[req_id] = drafts.parents
            scheduler_output.num_invalid_spec_tokens[req_id] = count - known
            self._offers[req_id] = Offer(tokens, drafts.parents, constrained)
        told: Any = scheduler_output
        told.tree_parents = parents

    def choose(self, draft_token_ids: DraftTokenIds) -> dict[str, Candidates]:
        """What each grammar allows of its request's candidates, as many as can be verified."""
        chosen: dict[str, Candidates] = {}
        given: Mapping[str, Candidates] = getattr(draft_token_ids, "candidates", {})
        most = self._affordable(len(given))
        for req_id, candidates in given.items():
            request = self.requests.get(req_id)
            self._offers.pop(req_id, None)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            constrained = request.use_structured_output and self._is_constrained(request)
            if constrained:
                drafts = self._allowed(request, candidates)
            elif request.use_structured_output:
                drafts = self._reasoning(request, candidates)
            else:  # no rule was given after all
                drafts = candidates
            chosen[req_id] = drafts = drafts.first(most)
            self._offers[req_id] = Offer(drafts.token_ids, drafts.parents, constrained)
        return chosen

    def offer(
        self, req_ids: Sequence[str], drafts: Sequence[list[int]], chosen: Mapping[str, Any]
    ) -> None:
        """Have the next step verify ``drafts``; those ``chosen`` are not checked as chains."""
        pairs = list(zip(req_ids, drafts, strict=True))
        plain = [[] if req_id in chosen else tokens for req_id, tokens in pairs]
        super().update_draft_token_ids(DraftTokenIds(list(req_ids), plain))
        for req_id, tokens in pairs:
            if req_id in chosen:
                self.requests[req_id].spec_token_ids = tokens
        if len(self._offers) > len(self.requests):
            self._offers = {name: o for name, o in self._offers.items() if name in self.requests}

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Each node's mask is the grammar's state after its own path."""
        trees = tree_parents(scheduler_output)
        if not trees:
            return super().get_grammar_bitmask(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        stock = copy.copy(scheduler_output)  # those of trees are left to us
        stock.scheduled_spec_decode_tokens = {
            req_id: tokens for req_id, tokens in drafts.items() if req_id not in trees
        }
        plain = super().get_grammar_bitmask(stock)
        if plain is None:
            return None
        masks = self._buffer(len(plain.grammar_bitmask) + sum(map(len, trees.values())))
        rows, end, start = masks.numpy(), 0, 0
        acceptable = list(plain.num_acceptable_drafts or ())
        for place, req_id in enumerate(plain.structured_output_request_ids):
            known = 1 + len(stock.scheduled_spec_decode_tokens.get(req_id, ()))
            rows[end : end + known] = plain.grammar_bitmask[start : start + known]
            start += known
            if req_id in trees:
                tokens = drafts[req_id]
                if self._offers[req_id].constrained:
                    begun = time.perf_counter()
                    grammar = _grammar(self.requests[req_id])
                    fill_masks(grammar, masks, end, tokens, trees[req_id])
                    each = (time.perf_counter() - begun) / max(len(tokens), 1)
                    self._fill_time = _followed(self._fill_time, each)
                else:
                    rows[end + 1 : end + 1 + len(tokens)] = -1
                acceptable[place] = len(strip_speculative_padding(tokens))
                end += len(tokens)
            end += known
        return GrammarOutput(plain.structured_output_request_ids, rows[:end], acceptable)

    def _affordable(self, requests: int) -> int:
        """Drafts of each of so many requests whose masks take a small part of a step."""
        cost = requests * self._fill_time
        if cost * self.num_spec_tokens <= _SHARE * self._step_time or not self._step_time:
            return self.num_spec_tokens
        return max(1, int(_SHARE * self._step_time / cost))

    def _buffer(self, rows: int) -> Tensor:
        if self._masks is None or len(self._masks) < rows:
            backend = self.structured_output_manager.backend
            assert backend is not None
            self._masks = backend.allocate_token_bitmask(2 * rows)
        return self._masks

    def _is_constrained(self, request: Request) -> bool:
        """Whether the next token follows the grammar; before it there may be reasoning."""
        return self._constrained_from(request, []) == 0

    def _constrained_from(self, request: Request, tokens: list[int]) -> int:
        """How many of ``tokens`` come before the grammar; one more than all: it doesn't begin."""
        bounds = self.structured_output_manager._get_constraint_bounds(request, tokens)
        return int(bounds.constraint_start)

    def _allowed(self, request: Request, drafts: Candidates) -> Candidates:
        """What the grammar allows, as deep as heads draft and the request has a use for."""
        depth = min(self._drafted_depth, request.max_tokens - request.num_output_tokens - 1)
        spell = self.structured_output_manager.tokenizer.convert_ids_to_tokens
        vocab = self.vllm_config.model_config.get_vocab_size()
        return choose(_grammar(request), drafts, depth, self._buffer(1)[:1], vocab, spell)

    def _reasoning(self, request: Request, drafts: Candidates) -> Candidates:
        """The drafts with which the reasoning goes on; where it may end, the step does too."""
        kept: list[int] = []
        inside = {0}
        for node, parent in enumerate(drafts.parents, 1):
            if parent in inside and self._goes_on(request, drafts.path(node)):
                inside.add(node)
                kept.append(node)
        return drafts.subset(kept)

    def _before_the_end(self, request: Request, drafts: Candidates) -> int:
        """How many drafts come before the first with which the reasoning may end."""
        nodes = range(1, 1 + len(drafts.parents))
        ends = (n for n in nodes if not self._goes_on(request, drafts.path(n)))
        return next(ends, 1 + len(drafts.parents)) - 1

    def _goes_on(self, request: Request, path: list[int]) -> bool:
        """Whether the reasoning goes on behind these tokens."""
        return self._constrained_from(request, path) > len(path)


class GrammarAsyncScheduler(GrammarScheduler, AsyncScheduler):
    """Schedules a step ahead, as vLLM does."""


def _followed(known: float, value: float) -> float:
    """A mean that follows its values; 0: nothing is known."""
    return known + _NEWS * (value - known) if known else value


def _grammar(request: Request) -> StructuredOutputGrammar:
    structured = request.structured_output_request
    assert structured is not None
    grammar = structured.grammar
    assert isinstance(grammar, StructuredOutputGrammar)
    return grammar
