"""The sampling metadata of plain decoding for a request, node by node along its path.

``thinking_token_budget`` is vLLM's own state machine, updated as in plain decoding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_medusa.integration.overrides import override


class PathHistory:
    """Tracks B walks; the host keeps token lists only for requests that depend on them."""

    def __init__(self, metadata: SamplingMetadata, batch_size: int):
        self.metadata = metadata
        self.has_budgets = has_budgets(metadata)
        self.keeps_tokens = needs_tokens(metadata) or self.has_budgets
        self.min_tokens = min_token_rules(metadata)
        self.paths: list[list[int]] = [[] for _ in range(batch_size)]

    def at(self, active: Tensor) -> SamplingMetadata:
        """Metadata for one row per request; requests that are not ``active`` draw nothing."""
        changes: dict[str, Any] = {}
        if self.metadata.generators:
            going = active.tolist()
            changes["generators"] = {
                index: gen for index, gen in self.metadata.generators.items() if going[index]
            }
        if self.keeps_tokens:
            changes["output_token_ids"] = [
                [*output, *path] if path else output
                for output, path in zip(self.metadata.output_token_ids, self.paths, strict=True)
            ]
        if self.min_tokens:
            lengths = [len(path) for path in self.paths]
            changes["logitsprocs"] = with_min_tokens(
                self.metadata, MinTokensAt(self.min_tokens, list(enumerate(lengths)))
            )
        metadata = replace(self.metadata, **changes) if changes else self.metadata
        return one_row_each(metadata, active.tolist()) if self.has_budgets else metadata

    def extend(self, tokens: Tensor) -> None:
        """Append the tokens sampled at this level (int64 [B])."""
        if self.keeps_tokens or self.min_tokens:
            for path, token in zip(self.paths, tokens.tolist(), strict=True):
                path.append(token)


class MinTokensAt:
    """`min_tokens` at given nodes: stop tokens are masked until the minimum is reached.

    vLLM's own processor counts output tokens only between steps, so it would continue masking
    below the node where the request reaches its minimum. Like vLLM's, this one does not mask stop
    tokens of a request whose grammar allows nothing else.
    """

    def __init__(self, rules: dict[int, Any], rows: list[tuple[int, int]]):
        barred: list[tuple[int, int]] = []
        self.grammar_rows: list[int] = []  # indices among the masked rows
        for row, (request, depth) in enumerate(rows):
            if request in rules:
                minimum, output, stop_token_ids, follows_grammar = rules[request]
                if len(output) + depth < minimum:
                    barred.extend((row, token) for token in stop_token_ids)
                    self.grammar_rows += [row] * follows_grammar
        self.barred = barred

    def apply(self, logits: Tensor) -> Tensor:
        """Mask stop tokens in place: logits [rows, V]."""
        if self.barred:
            grammar = logits[self.grammar_rows]
            index = torch.tensor(self.barred, device=logits.device).unbind(1)
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


def one_row_each(metadata: SamplingMetadata, going: list[bool] | None = None) -> SamplingMetadata:
    """The metadata with thinking budgets as in plain decoding: one row and one token per request.

    vLLM's state machine treats every grown output as a step, so it must not see new outputs of
    requests that are not ``going``. (With speculation it expects the rows of a chain.)
    """
    if not has_budgets(metadata):
        return metadata
    holder: Any = copy.copy(metadata.thinking_budget_state_holder)
    holder.in_spec_mode, holder.cu_num_tokens = False, {}
    holder._state = {
        index: state for index, state in holder._state.items() if going is None or going[index]
    }
    return replace(metadata, thinking_budget_state_holder=holder, spec_token_ids=None)


def install_moves() -> None:
    """Clear the state of a batch slot that is reused by a request without a budget.

    vLLM 0.32 keeps it, and forces the end of thinking in an unrelated request.
    """
    override(ThinkingBudgetStateHolder, "sync_batch", _sync_batch)


def _sync_batch(original: Callable[..., None], self: Any, batch_update: BatchUpdate | None) -> None:
    for _, place, direction in batch_update.moved if batch_update else ():
        if direction == MoveDirectionality.UNIDIRECTIONAL:
            self._state.pop(place, None)
    original(self, batch_update)
