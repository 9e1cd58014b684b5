"""The sampling metadata of plain decoding for a request, node by node along its path.

``thinking_token_budget`` is vLLM's own state machine, updated as in plain decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_medusa.integration.overrides import override

_PENALTIES = ("frequency", "presence", "repetition")


class PathHistory:
    """The paths of B walks so far, and the metadata to sample their next tokens."""

    def __init__(self, metadata: SamplingMetadata, batch_size: int):
        self.metadata = metadata
        self.has_budgets = has_budgets(metadata)
        self.keeps_tokens = needs_tokens(metadata) or self.has_budgets
        # no row can be left out: thinking budgets have state by row, logprobs one row per request
        self.needs_all = self.has_budgets or metadata.max_num_logprobs is not None
        self.needs_all |= bool(metadata.logprob_token_ids)
        self.may_change = self.keeps_tokens or bool(min_token_rules(metadata))
        self.paths: list[list[int]] = [[] for _ in range(batch_size)]

    def at(self, active: np.ndarray) -> tuple[np.ndarray, SamplingMetadata]:
        """The requests to sample, int64 [R], and the metadata of one row for each.

        These are the ``active`` ones (bool [B]) unless all rows are needed. Others draw nothing.
        """
        walking = active.tolist()
        is_same = not self.paths[0] or not self.may_change  # as in plain decoding
        if is_same and all(walking) and not self.has_budgets:
            return np.arange(len(walking)), self.metadata
        owners = [row for row, walks in enumerate(walking) if walks or self.needs_all]
        outputs = None
        if self.keeps_tokens:
            known = self.metadata.output_token_ids
            outputs = [[*known[row], *self.paths[row]] for row in owners]
        metadata = of_rows(self.metadata, owners, outputs, [len(self.paths[row]) for row in owners])
        generators = self.metadata.generators
        metadata.generators = {
            row: generators[owner]
            for row, owner in enumerate(owners)
            if walking[owner] and owner in generators
        }
        if self.has_budgets:
            metadata = one_row_each(metadata, walking)
        return np.array(owners, dtype=np.int64), metadata

    def extend(self, tokens: np.ndarray) -> None:
        """Append the tokens sampled at this level (int64 [B])."""
        for path, token in zip(self.paths, tokens.tolist(), strict=True):
            path.append(token)


def of_rows(
    metadata: SamplingMetadata,  # of the batch
    owners: Sequence[int],  # the request of each row; a request may have several rows, or none
    outputs: list[list[int]] | None,  # output tokens before each row; None: see `needs_tokens`
    depths: Sequence[int],  # how many of them are of this step
) -> SamplingMetadata:
    """The metadata of the given rows, without generators."""
    of = torch.tensor(owners, dtype=torch.int64)

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[of.to(tensor.device)]

    changes: dict[str, Any] = {
        name: pick(getattr(metadata, name))
        for name in ("temperature", "top_p", "top_k", "allowed_token_ids_mask")
    }
    if not metadata.no_penalties:
        names = ("prompt_token_ids", *(f"{kind}_penalties" for kind in _PENALTIES))
        changes |= {name: pick(getattr(metadata, name)) for name in names}
    if outputs is not None:
        changes["output_token_ids"] = outputs
    if words := metadata.bad_words_token_ids:
        changes["bad_words_token_ids"] = {
            row: words[owner] for row, owner in enumerate(owners) if owner in words
        }
    if rules := min_token_rules(metadata):
        processor = MinTokensAt(rules, list(zip(owners, depths, strict=True)))
        changes["logitsprocs"] = with_min_tokens(metadata, processor)
    return replace(metadata, generators={}, spec_token_ids=None, **changes)


class MinTokensAt:
    """`min_tokens` at given nodes: stop tokens are masked until the minimum is reached.

    vLLM's own processor counts output tokens only between steps, so it would continue masking
    below the node where the request reaches its minimum. Like vLLM's, this one does not mask stop
    tokens of a request whose grammar allows nothing else.
    """

    def __init__(self, rules: dict[int, Any], rows: list[tuple[int, int]]):
        self.masked: list[tuple[int, int]] = []  # row, token
        self.grammar_rows: list[int] = []  # masked rows of requests with a grammar
        for row, (request, depth) in enumerate(rows):
            if request in rules:
                minimum, output, stop_token_ids, follows_grammar = rules[request]
                if len(output) + depth < minimum:
                    self.masked.extend((row, token) for token in stop_token_ids)
                    self.grammar_rows += [row] * follows_grammar

    def apply(self, logits: Tensor) -> Tensor:
        """Mask stop tokens in place: logits [rows, V]."""
        if self.masked:
            grammar = logits[self.grammar_rows]
            index = torch.tensor(self.masked, device=logits.device).unbind(1)
            logits[index] = -float("inf")
            if len(grammar):
                ended = logits[self.grammar_rows].isneginf().all(1, keepdim=True)
                logits[self.grammar_rows] = grammar.where(ended, logits[self.grammar_rows])
        return logits


def needs_tokens(metadata: SamplingMetadata) -> bool:
    """Whether sampling depends on earlier tokens, not only on the logits."""
    return not metadata.no_penalties or bool(metadata.bad_words_token_ids)


def min_token_rules(metadata: SamplingMetadata) -> dict[int, Any]:
    """Request -> (min_tokens, output token ids, stop token ids, grammar) of vLLM's processor."""
    rules: dict[int, Any] = {}
    for processor in metadata.logitsprocs.non_argmax_invariant:
        rules.update(getattr(processor, "min_toks", {}))
    return rules


def with_min_tokens(metadata: SamplingMetadata, processor: MinTokensAt) -> LogitsProcessors:
    """The logits processors of vLLM with its min_tokens processor replaced."""
    kept = LogitsProcessors()
    kept.argmax_invariant = list(metadata.logitsprocs.argmax_invariant)
    kept.non_argmax_invariant = [
        other
        for other in metadata.logitsprocs.non_argmax_invariant
        if not hasattr(other, "min_toks")
    ]
    kept.non_argmax_invariant.append(processor)  # type: ignore[arg-type]
    return kept


def has_budgets(metadata: SamplingMetadata) -> bool:
    """Whether any request has a thinking budget."""
    holder = metadata.thinking_budget_state_holder
    return holder is not None and bool(holder.has_tracked_requests())


def one_row_each(metadata: SamplingMetadata, walking: list[bool] | None = None) -> SamplingMetadata:
    """The metadata with thinking budgets as in plain decoding: one row and one token per request.

    vLLM's state machine treats every grown output as a step, so it must not see new outputs of
    requests that are not ``walking``. (With speculation it expects the rows of a chain.)
    """
    if not has_budgets(metadata):
        return metadata
    holder: Any = copy.copy(metadata.thinking_budget_state_holder)
    holder.in_spec_mode, holder.cu_num_tokens = False, {}
    holder._state = {
        index: state for index, state in holder._state.items() if walking is None or walking[index]
    }
    return replace(metadata, thinking_budget_state_holder=holder, spec_token_ids=None)


def install_moves() -> None:
    """Clear the state of a batch slot that is reused by a request without a budget.

    vLLM 0.32 keeps it, and forces the end of thinking in an unrelated request.
    """
    override(ThinkingBudgetStateHolder, "sync_batch", _sync_batch)


def _sync_batch(original: Callable[..., None], self: Any, batch_update: BatchUpdate | None) -> None:
    for _, slot, direction in batch_update.moved if batch_update else ():
        if direction == MoveDirectionality.UNIDIRECTIONAL:
            self._state.pop(slot, None)
    original(self, batch_update)
