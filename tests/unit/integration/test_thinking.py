"""vLLM's state of thinking budgets, by a request's slot in the batch."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_medusa.integration.v1.history import install_moves

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


def budgets_after(moved):
    """Requests 1 and 3 of four have a budget; then 0 and 1 end, and others move to their slots."""
    tokens = SimpleNamespace(reasoning_start_token_ids=[5], reasoning_end_token_ids=[6])
    holder = ThinkingBudgetStateHolder(tokens, 4, 7, torch.device("cpu"), False)
    added = [
        (place, SamplingParams(thinking_token_budget=budget), [5, 9], [])
        for place, budget in enumerate((None, 1, None, 3))
    ]
    holder.sync_batch(BatchUpdate(4, [], added, []))
    holder.sync_batch(BatchUpdate(2, [], [], moved))
    return {place: state["thinking_token_budget"] for place, state in holder._state.items()}


def test_a_move_clears_the_state_of_the_slot():
    install_moves()
    assert budgets_after([(3, 0, ONE_WAY), (2, 1, ONE_WAY)]) == {0: 3}
    assert budgets_after([(3, 0, ONE_WAY), (2, 1, ONE_WAY), (0, 1, SWAP)]) == {1: 3}


def test_vllm_keeps_it(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the override can be removed."""
    install_moves()
    stock = inspect.unwrap(ThinkingBudgetStateHolder.sync_batch)
    monkeypatch.setattr(ThinkingBudgetStateHolder, "sync_batch", stock)
    assert budgets_after([(3, 0, ONE_WAY), (2, 1, ONE_WAY)]) == {0: 3, 1: 1}
