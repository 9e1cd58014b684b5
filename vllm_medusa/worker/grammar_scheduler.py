"""Schedulers that draft for requests which follow a grammar: what is allowed, and its masks.

A worker proposes candidates for such a request, in a list of its own that vLLM's schedulers never
see. Here the grammar chooses among them, before their number is decided, and what is scheduled
goes to the workers with its topology (`tree_parents` of the step). The masks of the step are
vLLM's at every root and follow the grammar down the tree from there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_medusa.worker.depths import DepthScheduler
from vllm_medusa.worker.grammar import (
    LIKELY,
    Candidates,
    Row,
    Spelling,
    choose,
    fill_masks,
    forced_run,
)
from vllm_medusa.worker.requests import GREEDY_BELOW
from vllm_medusa.worker.spent import Chance, Spent, followed

_SHARE = 0.1  # of a step's time that its drafts' masks may take


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
    masks: Sequence[Row] = ()  # of the drafts, if they are known already


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
        alone = self.vllm_config.parallel_config.world_size == 1
        ahead = self.scheduler_config.async_scheduling
        self.spent = Spent(masks_count=alone and not ahead)
        self._runs: dict[str, list[tuple[int, int]]] = {}  # tokens and kinds, see `forced_run`
        self._chances = (Chance(), Chance())  # of greedy requests, and of others
        # masks of this step's roots, as far as they are known; a name may be another's by then
        self._roots: list[tuple[StructuredOutputGrammar, Row]] = []
        self._masks: Tensor | None = None  # int32 [rows of a step or more, ceil(V / 32)]
        self._sessions = False  # there was a request that takes more input later

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        self._sessions |= request.resumable
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; the workers are told the topologies that they can't know."""
        self._started = time.perf_counter()
        if self._sessions:  # more input follows what a step accepted, stop token or not
            for request in self.running:
                if request.resumable:
                    request.spec_token_ids = []
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
        self._roots.clear()
        if self._runs:
            self._learn_runs(args[0])
        result = super().update_from_output(scheduler_output, *args)
        if scheduler_output.has_structured_output_requests:
            took = time.perf_counter() - self._started
            self._step_time = followed(self._step_time, took)
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
            if constrained:
                known = self._before(self._ignored_end(request), drafts)
            else:
                known = self._before_the_end(request, drafts)
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
        begun = time.perf_counter()
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
            self._keep_run(req_id, drafts)
            chosen[req_id] = drafts = drafts.first(most)
            self._offers[req_id] = Offer(drafts.token_ids, drafts.parents, constrained)
        if given:
            self.spent.on_choosing(len(given), time.perf_counter() - begun)
        return chosen

    def force(self, req_ids: Sequence[str]) -> dict[str, Candidates]:
        """What grammars all but force of requests that no head drafted for."""
        chosen: dict[str, Candidates] = {}
        vocab = self.vllm_config.model_config.get_vocab_size()
        if not req_ids:
            return chosen
        mask = self._buffer(1)[:1]
        for req_id in req_ids:
            request = self.requests.get(req_id)
            self._offers.pop(req_id, None)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            if self._is_constrained(request):
                depth = min(self._depth_of_runs, self._useful_depth(request))
                grammar = _grammar(request)
                run, (root, *masks) = forced_run(
                    grammar,
                    depth,
                    mask,
                    vocab,
                    self._spelling,
                    self._longest(request).value,
                )
                run = run.first(self._before(self._ignored_end(request), run))
                self._roots.append((grammar, root))
                chosen[req_id] = run
                self._keep_run(req_id, run)
                self._offers[req_id] = Offer(run.token_ids, run.parents, True, masks)
        return chosen

    def offer(
        self, req_ids: Sequence[str], drafts: Sequence[list[int]], chosen: Mapping[str, Any]
    ) -> None:
        """Have the next step verify ``drafts``; those ``chosen`` are not checked as chains."""
        pairs = list(zip(req_ids, drafts, strict=True))
        if not any(drafts) and not chosen:
            for request in map(self.requests.get, req_ids):
                if request is not None and request.spec_token_ids:
                    request.spec_token_ids = []
            return
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
        if not trees and not self._roots:
            return super().get_grammar_bitmask(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        stock = copy.copy(scheduler_output)  # those of trees are left to us
        stock.scheduled_spec_decode_tokens = {
            req_id: tokens for req_id, tokens in drafts.items() if req_id not in trees
        }
        plain = self._root_masks(stock)
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
                    known_masks = self._offers[req_id].masks
                    if known_masks and min(tokens, default=0) >= 0:
                        rows[end + 1 : end + 1 + len(tokens)] = known_masks[: len(tokens)]
                    else:
                        grammar = _grammar(self.requests[req_id])
                        fill_masks(grammar, masks, end, tokens, trees[req_id])
                    took = time.perf_counter() - begun
                    self._fill_time = followed(self._fill_time, took / max(len(tokens), 1))
                    self.spent.on_masks(len(tokens), took)
                else:
                    rows[end + 1 : end + 1 + len(tokens)] = -1
                acceptable[place] = len(strip_speculative_padding(tokens))
                end += len(tokens)
            end += known
        return GrammarOutput(plain.structured_output_request_ids, rows[:end], acceptable)

    def _root_masks(self, stock: SchedulerOutput) -> GrammarOutput | None:
        """As vLLM makes masks; those of roots that are known already are not made again."""
        manager, known = self.structured_output_manager, self._roots
        if not known or stock.scheduled_spec_decode_tokens:
            return super().get_grammar_bitmask(stock)
        rows = {id(grammar): row for grammar, row in known}
        make = manager._fill_bitmasks

        def fill(batch: Iterable[tuple[StructuredOutputGrammar, int, bool]]) -> None:
            for grammar, index, applies in batch:
                row = rows.get(id(grammar))
                if row is None or not applies:
                    make(((grammar, index, applies),))
                else:
                    assert manager._grammar_bitmask is not None
                    manager._grammar_bitmask[index] = torch.from_numpy(row)

        manager._fill_bitmasks = fill  # type: ignore[method-assign]
        try:
            return super().get_grammar_bitmask(stock)
        finally:
            del manager._fill_bitmasks

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
        useful = self._useful_depth(request)
        vocab, grammar = self.vllm_config.model_config.get_vocab_size(), _grammar(request)
        depth, deepest = min(self._drafted_depth, useful), min(self._depth_of_runs, useful)
        mask = self._buffer(1)[:1]
        longest = self._longest(request).value
        drafts = choose(grammar, drafts, depth, mask, vocab, self._spelling, longest, deepest)
        end = self._ignored_end(request)
        if end is None:
            return drafts
        return drafts.subset([i for i, token in enumerate(drafts.token_ids, 1) if token != end])

    def _ignored_end(self, request: Request) -> int | None:
        """The token that ends the grammar, if the request goes on behind it; else None.

        It is not drafted: some backends refuse what comes behind it in the same step.
        """
        end: int | None = self.structured_output_manager.tokenizer.eos_token_id
        params = request.sampling_params
        stops = params is None or end in (params.eos_token_id, *(params.stop_token_ids or ()))
        return None if stops else end

    @staticmethod
    def _before(end: int | None, drafts: Candidates) -> int:
        """How many drafts come before the first of these tokens."""
        tokens = drafts.token_ids
        return tokens.index(end) if end is not None and end in tokens else len(tokens)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.structured_output_manager.tokenizer.convert_ids_to_tokens)

    def _longest(self, request: Request) -> Chance:
        """How often a request like this one takes the longest token of a few."""
        params = request.sampling_params
        return self._chances[params is None or params.temperature >= GREEDY_BELOW]

    def _keep_run(self, req_id: str, drafts: Candidates) -> None:
        pairs = zip(drafts.token_ids, drafts.forced, strict=False)
        self._runs[req_id] = [pair for pair in pairs if pair[1]]

    def _learn_runs(self, output: Any) -> None:
        """See how far the requests went the way that their grammars forced."""
        for req_id, run in self._runs.items():
            request, index = self.requests.get(req_id), output.req_id_to_index.get(req_id)
            if request is None or index is None:
                continue
            chance = self._longest(request)
            for token, (guess, kind) in zip(output.sampled_token_ids[index], run, strict=False):
                if kind == LIKELY:
                    chance.observe(token == guess)
                if token != guess:
                    break
        self._runs = {}

    def _useful_depth(self, request: Request) -> int:
        """How deep a draft can be and still give a token that the request keeps."""
        left = request.max_tokens - request.num_output_tokens
        return max(0, min(left, self.max_model_len - request.num_tokens) - 1)

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


def _grammar(request: Request) -> StructuredOutputGrammar:
    structured = request.structured_output_request
    assert structured is not None
    grammar = structured.grammar
    assert isinstance(grammar, StructuredOutputGrammar)
    return grammar
