"""Sampling metadata at each node of a path; thinking budgets by slot."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_medusa.integration.v1.history import MinTokensAt, PathHistory, install_moves, needs_tokens
from vllm_medusa.integration.v1.verification import _is_plain_greedy

BOTH, SECOND = np.array([True, True]), np.array([False, True])
OTHER: Any = SimpleNamespace(is_argmax_invariant=lambda: False)  # a processor that must be kept


class MinTokens:
    """The part of vLLM's processor that we use."""

    def __init__(self, rules: dict[int, tuple[Any, ...]]):
        self.min_toks = rules

    def is_argmax_invariant(self) -> bool:
        return False


def metadata(**changes: Any) -> SamplingMetadata:
    ones = torch.ones(2)
    values = {
        "temperature": ones, "all_greedy": False, "all_random": True, "top_p": None,
        "top_k": None, "generators": {}, "max_num_logprobs": None, "no_penalties": True,
        "prompt_token_ids": None, "frequency_penalties": ones, "presence_penalties": ones,
        "repetition_penalties": ones, "output_token_ids": [[7], [8, 9]],
        "allowed_token_ids_mask": None, "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }  # fmt: skip
    return SamplingMetadata(**values | changes)


@pytest.mark.parametrize("changes", [{"no_penalties": False}, {"bad_words_token_ids": {1: [[3]]}}])
def test_the_path_counts_as_output(changes):
    given = metadata(**changes)
    assert needs_tokens(given) and not needs_tokens(metadata())
    history = PathHistory(given, 2)
    assert history.at(BOTH)[1].output_token_ids == [[7], [8, 9]]
    history.extend(np.array([1, 2]))
    history.extend(np.array([3, 4]))
    assert history.at(BOTH)[1].output_token_ids == [[7, 1, 3], [8, 9, 2, 4]]
    requests, own = history.at(SECOND)
    assert requests.tolist() == [1] and own.output_token_ids == [[8, 9, 2, 4]]
    assert given.output_token_ids == [[7], [8, 9]]


def test_the_metadata_of_the_batch_while_all_walk_and_nothing_depends_on_the_path():
    rules = LogitsProcessors([MinTokens({1: (3, [8, 9], {1}, False)})])
    for given in (metadata(), metadata(max_num_logprobs=0)):
        history = PathHistory(given, 2)
        history.extend(np.array([1, 2]))
        requests, own = history.at(BOTH)
        assert requests.tolist() == [0, 1] and own is given
        assert history.at(SECOND)[1] is not given
    for given in (metadata(no_penalties=False), metadata(logitsprocs=rules)):
        history = PathHistory(given, 2)
        history.extend(np.array([1, 2]))
        assert history.at(BOTH)[1] is not given


@pytest.mark.parametrize("changes", [{}, {"max_num_logprobs": 0}, {"logprob_token_ids": {0: [1]}}])
def test_only_active_requests_have_rows(changes):
    """Except with logprobs; inactive requests draw nothing in any case."""
    first, second = torch.Generator(), torch.Generator()
    rules = MinTokens({1: (3, [8, 9], {1}, False)})
    given = metadata(
        temperature=torch.tensor([0.5, 0.7]),
        top_k=torch.tensor([5, 6]),
        generators={0: first, 1: second},
        allowed_token_ids_mask=torch.eye(2, dtype=torch.bool),
        bad_words_token_ids={1: [[3]]},
        no_penalties=False,
        presence_penalties=torch.tensor([0.1, 0.2]),
        logitsprocs=LogitsProcessors([rules]),
        **changes,
    )
    requests, own = PathHistory(given, 2).at(SECOND)
    place = int(bool(changes))  # of request 1 among the rows
    assert requests.tolist() == [0, 1][1 - place :]
    assert own.temperature[place] == 0.7 and own.top_k[place] == 6 and own.top_p is None
    assert own.generators == {place: second} and given.generators == {0: first, 1: second}
    assert own.allowed_token_ids_mask[place].tolist() == [False, True]
    assert own.bad_words_token_ids == {place: [[3]]}
    assert own.presence_penalties[place] == 0.2 and own.output_token_ids[place] == [8, 9]
    (minimum,) = own.logitsprocs.non_argmax_invariant
    assert minimum.apply(torch.zeros(1 + place, 2))[place].isneginf().tolist() == [False, True]


@pytest.mark.parametrize("grammar", [False, True])
def test_stop_tokens_are_masked_until_the_minimum_is_reached(grammar):
    """Request 0 has two of three tokens; a grammar that allows only stop tokens may end earlier."""
    rules = {0: (3, [7, 7], {1, 2}, grammar)}
    rows = [(0, 0), (0, 1), (1, 0), (0, 0)]
    logits = torch.zeros(4, 4)
    logits[3, [0, 3]] = -torch.inf  # only stop tokens are allowed
    masked = MinTokensAt(rules, rows).apply(logits.clone()).isneginf()
    stops = [False, True, True, False]
    none = [False] * 4
    allowed = [True, False, False, True] if grammar else [True] * 4
    assert masked.tolist() == [stops, none, none, allowed]


@pytest.mark.parametrize(
    "changes",
    [
        {"all_greedy": False},
        {"no_penalties": False},
        {"bad_words_token_ids": {1: [[3]]}},
        {"allowed_token_ids_mask": torch.ones(2, 9, dtype=torch.bool)},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"logitsprocs": LogitsProcessors([MinTokens({0: (2, [], {5}, False)})])},
        {"logitsprocs": LogitsProcessors([OTHER])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_greedy_requests_may_need_more_than_the_argmax(changes):
    plain = {"all_greedy": True, "all_random": False, "temperature": None}
    assert _is_plain_greedy(metadata(**plain))
    assert not _is_plain_greedy(metadata(**plain | changes))


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


def test_vllm_keeps_the_state_of_the_slot(monkeypatch: pytest.MonkeyPatch):
    """The behavior that is overridden; if this fails, the override can be removed."""
    install_moves()
    stock = inspect.unwrap(ThinkingBudgetStateHolder.sync_batch)
    monkeypatch.setattr(ThinkingBudgetStateHolder, "sync_batch", stock)
    assert budgets_after([(3, 0, ONE_WAY), (2, 1, ONE_WAY)]) == {0: 3, 1: 1}
