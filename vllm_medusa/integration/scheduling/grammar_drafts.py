"""Drafts of requests with a grammar: allowed and forced drafts, and their masks.

A worker proposes candidates for such a request, in a separate list that vLLM's schedulers never
see. Here the grammar chooses among them, before their number is decided, and the scheduled drafts
are sent to the workers with their topology (`tree_parents` of the step). The masks of the step are
vLLM's at every root and follow the grammar down the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.utils import strip_speculative_padding

from vllm_medusa.integration.drafters.draft_messages import Draft, tree_parents
from vllm_medusa.integration.requests import GREEDY_BELOW
from vllm_medusa.integration.scheduling.grammar import (
    LIKELY,
    Candidates,
    Chance,
    Spelling,
    choose,
    fill_masks,
    forced_run,
)


class GrammarDrafts:
    """Selects drafts by grammar; see the module docstring."""

    def __init__(
        self,
        manager: Any,  # vLLM's `StructuredOutputManager`
        vocab_size: int,  # V, the size of masks
        max_model_len: int,
        depth: int,  # max depth of trees from heads
        run_depth: int,  # max depth of forced runs, which may be deeper
    ) -> None:
        self.manager, self.vocab_size, self.max_model_len = manager, vocab_size, max_model_len
        self.depth, self.run_depth = depth, run_depth
        self._chances = Chance(), Chance()  # for greedy and for other requests
        self._masks: Tensor | None = None  # int32 [>= rows of a step, ceil(V / 32)]

    def chosen(self, request: Request, candidates: Candidates, max_drafts: int) -> Draft:
        """The best allowed candidates of a request, and the forced drafts."""
        constrained = request.use_structured_output and self._is_constrained(request)
        drafts = candidates  # the request has no grammar
        if constrained:
            drafts = self._allowed(request, candidates)
        elif request.use_structured_output:
            drafts = self._within_reasoning(request, candidates)
        return _draft(request, drafts.first(max_drafts), constrained)

    def forced(self, request: Request) -> Draft | None:
        """The drafts that the grammar nearly forces, for a request without drafts from heads."""
        if not self._is_constrained(request):
            return None
        depth = min(self.run_depth, self._useful_depth(request))
        chance = self._chance(request).value
        run = forced_run(
            _grammar(request), depth, self._buffer(1)[:1], self.vocab_size, self._spelling, chance
        )
        run = run.first(_before(self._ignored_end(request), run))
        return _draft(request, run, constrained=True)

    def scheduled(
        self, request: Request, candidates: Candidates, count: int
    ) -> tuple[Draft, list[int]]:
        """Candidates that a step scheduled ahead already verifies, and its draft tokens.

        A prefix of these is valid; vLLM replaces the invalid ones at the end with -1. Masks encode
        what the grammar allows.
        """
        drafts, constrained = candidates.first(count), self._is_constrained(request)
        if constrained:
            known = _before(self._ignored_end(request), drafts)
        else:
            nodes = range(1, 1 + len(drafts.parents))
            ends = (node for node in nodes if not self._reasons(request, drafts.path(node)))
            known = next(ends, 1 + len(drafts.parents)) - 1
        draft = _draft(request, drafts, constrained)
        draft.token_ids = drafts.token_ids[:known]
        return draft, draft.token_ids + [-1] * (count - known)

    def learn(self, draft: Draft, sampled: list[int]) -> None:
        """Update the estimate with the accepted part of a forced run."""
        for token, (guess, kind) in zip(sampled, draft.run, strict=False):
            if kind == LIKELY:
                self._chance(draft.request).observe(token == guess)
            if token != guess:
                break

    def bitmask(
        self,
        output: SchedulerOutput,
        pending: Mapping[str, Draft],  # drafts of its requests
        make: Callable[[SchedulerOutput], GrammarOutput | None],  # vLLM's own, for chains
    ) -> GrammarOutput | None:
        """The masks of a step: each node's is the grammar's state after its own path."""
        trees = tree_parents(output)
        if not trees:
            return make(output)
        drafts = output.scheduled_spec_decode_tokens
        stock = copy.copy(output)  # vLLM's part
        stock.scheduled_spec_decode_tokens = {
            req_id: tokens for req_id, tokens in drafts.items() if req_id not in trees
        }
        plain = make(stock)
        if plain is None:
            return None
        masks = self._buffer(len(plain.grammar_bitmask) + sum(map(len, trees.values())))
        rows, end, start = masks.numpy(), 0, 0
        acceptable = list(plain.num_acceptable_drafts or ())
        for place, req_id in enumerate(plain.structured_output_request_ids):
            known = 1 + len(stock.scheduled_spec_decode_tokens.get(req_id, ()))
            rows[end : end + known] = plain.grammar_bitmask[start : start + known]
            start, end = start + known, end + known
            if req_id in trees:
                tokens, draft = drafts[req_id], pending[req_id]
                if draft.constrained:
                    fill_masks(_grammar(draft.request), masks, end - 1, tokens, trees[req_id])
                else:
                    rows[end : end + len(tokens)] = -1
                acceptable[place] = len(strip_speculative_padding(tokens))
                end += len(tokens)
        return GrammarOutput(plain.structured_output_request_ids, rows[:end], acceptable)

    def _buffer(self, rows: int) -> Tensor:
        if self._masks is None or len(self._masks) < rows:
            self._masks = self.manager.backend.allocate_token_bitmask(2 * rows)
        return self._masks

    def _constrained_from(self, request: Request, tokens: list[int]) -> int:
        """Number of ``tokens`` before the grammar starts; len + 1 if it does not start."""
        return int(self.manager._get_constraint_bounds(request, tokens).constraint_start)

    def _is_constrained(self, request: Request) -> bool:
        """Whether the next token follows the grammar; it may be preceded by reasoning."""
        return self._constrained_from(request, []) == 0

    def _reasons(self, request: Request, path: list[int]) -> bool:
        """Whether the reasoning continues after these tokens."""
        return self._constrained_from(request, path) > len(path)

    def _within_reasoning(self, request: Request, drafts: Candidates) -> Candidates:
        """The drafts that continue the reasoning; if it may end, the step ends there."""
        inside = {0}
        for node, parent in enumerate(drafts.parents, 1):
            if parent in inside and self._reasons(request, drafts.path(node)):
                inside.add(node)
        return drafts.subset(sorted(inside - {0}))

    def _allowed(self, request: Request, drafts: Candidates) -> Candidates:
        """The allowed drafts, up to the depth of the heads and the request's useful depth."""
        useful = self._useful_depth(request)
        drafts = choose(
            _grammar(request),
            drafts,
            min(self.depth, useful),
            self._buffer(1)[:1],
            self.vocab_size,
            self._spelling,
            self._chance(request).value,
            min(self.run_depth, useful),
        )
        end = self._ignored_end(request)
        if end is None:
            return drafts
        return drafts.subset([i for i, token in enumerate(drafts.token_ids, 1) if token != end])

    def _useful_depth(self, request: Request) -> int:
        """Max depth of a draft whose token the request can keep."""
        left = request.max_tokens - request.num_output_tokens
        return max(0, min(left, self.max_model_len - request.num_tokens) - 1)

    def _ignored_end(self, request: Request) -> int | None:
        """The token that ends the grammar, if the request continues after it; else None.

        It is not drafted: some backends refuse tokens after it in the same step.
        """
        end: int | None = self.manager.tokenizer.eos_token_id
        params = request.sampling_params
        stops = params is None or end in (params.eos_token_id, *(params.stop_token_ids or ()))
        return None if stops else end

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.manager.tokenizer.convert_ids_to_tokens)

    def _chance(self, request: Request) -> Chance:
        """The rate at which requests of this kind take the longest of a few tokens."""
        params = request.sampling_params
        return self._chances[params is None or params.temperature >= GREEDY_BELOW]


def _draft(request: Request, drafts: Candidates, constrained: bool) -> Draft:
    return Draft(
        drafts.survival,
        copied=drafts.forced or [0] * len(drafts.survival),
        request=request,
        token_ids=drafts.token_ids,
        parents=drafts.parents,
        constrained=constrained,
        run=[pair for pair in zip(drafts.token_ids, drafts.forced, strict=False) if pair[1]],
    )


def _before(end: int | None, drafts: Candidates) -> int:
    """Number of drafts before the first token ``end``; all drafts if there is none."""
    tokens = drafts.token_ids
    return tokens.index(end) if end is not None and end in tokens else len(tokens)


def _grammar(request: Request) -> StructuredOutputGrammar:
    structured = request.structured_output_request
    assert structured is not None
    grammar = structured.grammar
    assert isinstance(grammar, StructuredOutputGrammar)
    return grammar
