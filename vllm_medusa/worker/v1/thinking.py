"""`thinking_token_budget` along walks: vLLM's own state machine, updated as in plain decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_medusa.worker.overrides import override


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


def _sync_batch(original: Callable[..., None]) -> Callable[..., None]:
    def sync_batch(self: Any, batch_update: BatchUpdate | None) -> None:
        for _, place, direction in batch_update.moved if batch_update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                self._state.pop(place, None)
        original(self, batch_update)

    return sync_batch
