"""Sampling metadata at each node of a path."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_medusa.worker.v1.history import MinTokensAt, PathHistory, needs_tokens
from vllm_medusa.worker.v1.verification import _is_plain_greedy

ALL = torch.tensor([True, True])
FIRST = torch.tensor([True, False])
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


def test_without_history_nothing_is_copied():
    plain = metadata()
    history = PathHistory(plain, 2)
    history.extend(torch.tensor([1, 2]))
    assert history.at(0, ALL) is plain and history.at(1, ALL) is plain
    assert history.paths == [[], []]


def test_only_active_requests_draw():
    generators = {0: torch.Generator(), 1: torch.Generator()}
    history = PathHistory(metadata(generators=generators), 2)
    assert history.at(0, ALL).generators == generators
    assert history.at(1, FIRST).generators == {0: generators[0]}
    assert history.at(2, ~ALL).generators == {}


@pytest.mark.parametrize("changes", [{"no_penalties": False}, {"bad_words_token_ids": {1: [[3]]}}])
def test_the_path_counts_as_output(changes):
    given = metadata(**changes)
    assert needs_tokens(given) and not needs_tokens(metadata())
    history = PathHistory(given, 2)
    assert history.at(0, ALL).output_token_ids == [[7], [8, 9]]
    history.extend(torch.tensor([1, 2]))
    history.extend(torch.tensor([3, 4]))
    assert history.at(2, ALL).output_token_ids == [[7, 1, 3], [8, 9, 2, 4]]
    assert given.output_token_ids == [[7], [8, 9]]


def test_explicit_paths():
    history = PathHistory(metadata(no_penalties=False), 2, [[], [5]])
    assert history.at(0, ALL).output_token_ids == [[7], [8, 9, 5]]


def test_min_tokens_counts_the_path():
    processors = LogitsProcessors()
    rules = {1: (4, [8, 9], {0, 3}, False)}
    processors.non_argmax_invariant = [OTHER, MinTokens(rules)]
    given = metadata(logitsprocs=processors)
    history = PathHistory(given, 2)
    barred = []
    for level in range(4):  # request 1 has 2, 3, 4, 5 output tokens
        kept, mine = history.at(level, ALL).logitsprocs.non_argmax_invariant
        assert kept is OTHER and isinstance(mine, MinTokensAt)
        logits = mine.apply(torch.zeros(2, 5))
        assert not logits[0].isinf().any()
        barred.append(logits[1].isinf().nonzero().flatten().tolist())
        history.extend(torch.tensor([1, 1]))
    assert barred == [[0, 3], [0, 3], [], []]
    assert given.logitsprocs.non_argmax_invariant[1].min_toks is rules


def test_min_tokens_by_node():
    """Rows of one request at several depths, as in typical acceptance."""
    at = MinTokensAt({0: (2, [7], [4], False)}, [(0, 0), (1, 0), (0, 1), (0, 2)])
    logits = at.apply(torch.zeros(4, 5))
    assert logits.isinf().nonzero().tolist() == [[0, 4]]


def test_a_finished_grammar_may_stop_before_min_tokens():
    """If it allows only the stop token; without a grammar such a row stays masked."""
    only_stop = torch.tensor([-float("inf"), 1.0, -float("inf")]).repeat(2, 1)
    rules = {0: (5, [], {1}, True), 1: (5, [], {1}, False)}
    logits = MinTokensAt(rules, [(0, 0), (1, 0)]).apply(only_stop.clone())
    assert logits[0].tolist() == only_stop[0].tolist() and logits[1].isneginf().all()
    free = MinTokensAt(rules, [(0, 0)]).apply(torch.zeros(1, 3))
    assert free.isneginf().tolist() == [[False, True, False]]


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
