"""Lookup by itself: what is found, how it joins a tree, and how far it is trusted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.lookup.search import (
    MAX_MATCH,
    MIN_MATCH,
    _longest_matches,
    continuations_torch,
    join_torch,
)
from vllm_medusa.tree.drafts import FROM_BOTH, FROM_LOOKUP, DraftTrees

VOCAB = 5


def by_hand(tokens: list[int]) -> tuple[int, int]:
    last, best = len(tokens) - 1, (0, 0)
    for place in range(last):
        length = 0
        while length < min(MAX_MATCH, place + 1) and (
            tokens[place - length] == tokens[last - length]
        ):
            length += 1
        if length >= MIN_MATCH and length >= best[0]:
            best = length, place + 1
    return best


def table(texts: list[list[int]], width: int = 0) -> tuple[Tensor, Tensor]:
    """Padded with what is no token; and the lengths."""
    width = max(width, *map(len, texts))
    rows = [text + [VOCAB + 7] * (width - len(text)) for text in texts]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor([len(text) for text in texts])


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_and_latest_match_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = []
    for length in range(1, 60):
        tokens = rng.integers(0, VOCAB if seed % 2 else 2, length)
        if length > 50:
            tokens[-20:] = tokens[5:25]
        texts.append(tokens.tolist())
    matched, start = _longest_matches(*table(texts))
    found = list(zip(matched.tolist(), start.tolist(), strict=True))
    assert found == [by_hand(text) for text in texts]
    assert 0 in matched and matched.max() >= 20


def test_a_continuation_repeats_at_the_end_of_the_text() -> None:
    texts, lengths = table([[7, 1, 2, 3, 1, 2], [0] * 300])
    matched, found = continuations_torch(texts, torch.arange(2), lengths, 7)
    assert matched.tolist() == [2, MAX_MATCH]
    assert found[0].tolist() == [3, 1, 2, 3, 1, 2, 3] and not found[1].any()


def random_tree(rng: np.random.Generator, nodes: int, width: int) -> DraftTrees:
    """Siblings with tokens of their own, values that often tie; padded."""
    tokens, parents, values = [0], [-1], [0.0]
    while len(tokens) < nodes:
        parent, token = int(rng.integers(len(tokens))), int(rng.integers(VOCAB))
        if (token, parent) in zip(tokens, parents, strict=True):
            continue
        tokens.append(token)
        parents.append(parent)
        values.append(values[parent] + float(rng.choice([0.0, -0.5])))
    created = DraftTrees.of(*(torch.tensor([each]) for each in (tokens, parents, values)))
    return created.best(width)


def paths(trees: DraftTrees, row: int = 0) -> dict[tuple[int, ...], float]:
    """The survival of each path of tokens, in node order."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(trees.num_nodes[row])):
        found.append((*found[int(trees.parents[row, node])], int(trees.token_ids[row, node])))
    return dict(zip(found, trees.log_survival[row].tolist(), strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_both_are_one_tree(seed: int) -> None:
    """All paths of either with the higher survival, each once, best first, parents first."""
    rng = np.random.default_rng(seed)
    tree, chain = random_tree(rng, 12, 40), rng.integers(0, VOCAB, 9)
    if seed % 2:  # it follows the tree at first
        chain[:2] = max(paths(tree), key=lambda path: (len(path) >= 2, len(path)))[:2]
    survival = torch.tensor(rng.choice([0.0, -0.25, -0.5], 9).cumsum(), dtype=torch.float32)
    both = join_torch(tree, torch.from_numpy(chain)[None], survival[None], 9)
    expected = paths(tree)
    for depth, value in enumerate(survival.tolist(), 1):
        path = tuple(chain[:depth].tolist())
        expected[path] = max(expected.get(path, -np.inf), value)
    assert paths(both) == expected
    assert int(both.num_nodes) == len(expected)
    assert (both.parents[0, 1:] < torch.arange(1, 40)).all()
    assert (both.log_survival[0, 1:] <= both.log_survival[0, :-1]).all()
    named = list(zip(paths(both), both.source[0].tolist(), strict=False))
    copied = [tuple(chain[:depth].tolist()) for depth in range(1, 10)]
    assert [path for path, source in named if source] == copied
    assert not {path for path, source in named if source == FROM_LOOKUP} & set(paths(tree))
    assert seed % 2 == 0 or FROM_BOTH in both.source
    cut = join_torch(tree.prefix(12), torch.from_numpy(chain)[None], survival[None], 9).prefix(6)
    assert list(paths(cut)) == list(paths(both))[:6]
    assert torch.equal(cut.parents, both.parents[:, :6])


ONE, GREEDY = torch.tensor([0]), torch.tensor([False])


def extend(lookup: Lookup, text: list[int], depth: int = 9) -> DraftTrees:
    texts, length = table([text])
    roots = DraftTrees.roots(1, 1 + lookup.max_tokens, "cpu")
    return lookup.extend(ONE, texts, ONE, length, roots, torch.tensor([depth]), GREEDY, 0)


def learn(lookup: Lookup, text: list[int], num_new: int) -> None:
    lookup.learn(ONE, *(table([text])[0], ONE, table([text])[1]), torch.tensor([num_new]), GREEDY)


def test_requests_learn_from_what_they_said_next() -> None:
    lookup, text = Lookup(100, 1, 63, "cpu"), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    tree = extend(lookup, text, 4)
    assert tree.token_ids[0, 1 : int(tree.num_nodes)].tolist() == [4, 5, 6, 1]
    before = lookup.chances.clone()
    for _ in range(20):
        learn(lookup, [*text, 4, 9], 2)
        extend(lookup, text, 4)
        learn(lookup, [*text, 0, 0, 0, 4], 1)  # of another text: nothing was found for it
        extend(lookup, text, 4)
    after = lookup.chances
    assert after[0, 3] > before[0, 3] and after[0, 4] < 0.6 * before[0, 4]
    assert torch.equal(after[1], before[1])  # sampled requests are counted apart
    lookup.forget()
    assert torch.equal(lookup.chances, before)


def test_a_continuation_ends_before_what_is_no_token() -> None:
    tree = extend(Lookup(10, 1, 8, "cpu"), [1, 2, 5, 99, 1, 2])
    assert tree.token_ids[0, 1 : int(tree.num_nodes)].tolist() == [5]


def test_observed_frequencies_are_believed() -> None:
    """Whatever the prior says."""
    rng, lookup = np.random.default_rng(0), Lookup(1000, 1, 6, "cpu")
    true = np.interp(np.arange(MAX_MATCH + 1), [1, 8, MAX_MATCH], [0.9, 0.3, 0.6])
    for _ in range(1500):
        matched = int(rng.integers(2, MAX_MATCH + 1))
        same = rng.integers(100, 900, matched).tolist()
        text = [*same, 901, 902, 903, 904, 905, 906, 907, *same]
        extend(lookup, text)
        right = rng.random(6) < true[np.minimum(matched + np.arange(6), MAX_MATCH)]
        said = [901 + place if hit else 0 for place, hit in enumerate(right)]
        learn(lookup, [*text, *said], 6)
    assert (
        np.abs(
            lookup.chances[0, [2, 3, 5, 8, 20, MAX_MATCH]].numpy()
            - true[[2, 3, 5, 8, 20, MAX_MATCH]]
        ).max()
        < 0.15
    )


def test_a_batch_is_as_each_request_alone() -> None:
    """Texts that grow step by step, trees of other tokens, slots that differ from rows."""
    rng, nodes, batch = np.random.default_rng(3), 13, 4
    texts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 9, 30, 60)]
    slots, rows, copied = torch.tensor([6, 0, 3, 2]), torch.tensor([1, 3, 0, 2]), 0
    lookup = Lookup(VOCAB, 8, nodes - 1, "cpu")
    sampled = torch.tensor([True, False, False, True])
    for _ in range(20):
        for text in texts:
            text += text[-9:][: rng.integers(0, 4)]
        by_row = [texts[int(place)] for place in rows.argsort()]
        tokens, by_length = table(by_row)
        depth = torch.from_numpy(rng.integers(0, nodes + 1, batch))
        each = [random_tree(rng, int(rng.integers(1, 10)), nodes) for _ in texts]
        trees = DraftTrees(
            *(torch.cat(parts) for parts in zip(*(vars(t).values() for t in each), strict=True))
        )
        got = lookup.extend(slots, tokens, rows, by_length[rows], trees, depth, sampled, nodes)
        for row, text in enumerate(texts):
            alone = Lookup(VOCAB, 1, nodes - 1, "cpu")
            one = table([text])
            wanted = alone.extend(
                ONE, one[0], ONE, one[1], each[row], depth[[row]], sampled[[row]], nodes
            )
            assert paths(got, row) == pytest.approx(paths(wanted))
            copied += int((got.source[row] > 0).sum())
    assert copied > 100
