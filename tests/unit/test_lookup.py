"""Lookup on its own: what it finds, how it joins a tree, and its estimated accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.lookup import lookup as lookup_module
from vllm_medusa.lookup import search
from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.lookup.search import (
    AGREEMENTS,
    MAX_MATCH,
    continuations,
    join,
)
from vllm_medusa.tree.draft_trees import FROM_BOTH, FROM_LOOKUP, DraftTrees

VOCAB = 5
ONE, GREEDY = np.array([0]), np.array([False])


def by_hand(tokens: list[int]) -> tuple[int, int]:
    last, best = len(tokens) - 1, (0, 0)
    for place in range(last):
        length = 0
        while length < min(MAX_MATCH, place + 1) and (
            tokens[place - length] == tokens[last - length]
        ):
            length += 1
        if length and length >= best[0]:
            best = length, place + 1
    return best


def table(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Texts padded with non-tokens, and their lengths."""
    width = max(map(len, texts))
    rows = [text + [VOCAB + 7] * (width - len(text)) for text in texts]
    return np.array(rows, np.int32), np.array([len(text) for text in texts])


def check_match(tokens: list[int], count: int = 9) -> int:
    """The longest match and its continuation are those found by hand; returns its length."""
    texts, lengths = table([tokens, [*tokens, 1, 2]])  # the second is not searched
    matched, found, _ = continuations(texts, np.array([0]), lengths[:1], count)
    length, start = by_hand(tokens)
    assert matched.tolist() == [length]
    after = [tokens[start + d % (len(tokens) - start)] for d in range(count)]
    assert not length or found[0].tolist() == after
    return length


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_and_latest_match_is_found(seed: int) -> None:
    rng, found = np.random.default_rng(seed), set()
    for length in range(1, 60):
        tokens = rng.integers(0, VOCAB if seed % 2 else 2, length, dtype=np.int32)
        if length > 50:
            tokens[-20:] = tokens[5:25]
        found.add(check_match(tokens.tolist()))
    assert 0 in found and max(found) >= 20


def test_matches_of_one_repeated_token() -> None:
    """Of all lengths, also around the longest match."""
    for length in range(1, MAX_MATCH + 4):
        check_match([0] * length)


def test_a_continuation_repeats_at_the_end_of_the_text() -> None:
    texts, lengths = table([[7, 1, 2, 3, 1, 2], [0] * 300])
    matched, found, agreement = continuations(texts, np.arange(2), lengths, 7)
    assert matched.tolist() == [2, MAX_MATCH]
    assert found[0].tolist() == [3, 1, 2, 3, 1, 2, 3] and not found[1].any()
    assert agreement.tolist() == [[2, 2, 2, 0, 0, 0, 0], [5] * 7]  # 1 of 1, and 299 of 299


def agreements_by_hand(text: list[int], chain: list[int]) -> list[int]:
    last, levels = len(text) - 1, []
    starts = [
        place for place in range(max(last - search.WINDOW, 0), last) if text[place] == text[last]
    ]
    for depth, token in enumerate(chain, 1):
        before = [
            text[place + depth]
            for place in starts
            if place + depth <= last and text[place + 1 : place + depth] == chain[: depth - 1]
        ]
        levels.append(AGREEMENTS * before.count(token) // (len(before) + 2))
    return levels


@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_agreement_of_the_last_tokens_occurrences(monkeypatch: Any, vocab: int) -> None:
    monkeypatch.setattr(search, "WINDOW", 40)
    rng, levels = np.random.default_rng(vocab), set()
    for length in range(2, 90):
        text = rng.integers(0, vocab, length).tolist()
        matched, found, agreement = continuations(*table([text])[:1], ONE, np.array([length]), 9)
        if matched[0]:
            assert agreement[0].tolist() == agreements_by_hand(text, found[0].tolist())
            levels.update(agreement[0].tolist())
    assert len(levels) >= 3


def random_tree(rng: np.random.Generator, nodes: int, width: int) -> DraftTrees:
    """Siblings with distinct tokens, values that often tie; padded."""
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
    """All paths of both with the higher survival, each once, best first, parents first."""
    rng = np.random.default_rng(seed)
    tree, chain = random_tree(rng, 12, 40), rng.integers(0, VOCAB, 9)
    if seed % 2:  # it follows the tree initially
        chain[:2] = max(paths(tree), key=lambda path: (len(path) >= 2, len(path)))[:2]
    survival = rng.choice([0.0, -0.25, -0.5], 9).cumsum().astype(np.float32)
    both = join(tree, chain[None], survival[None], 9)
    expected = paths(tree)
    for depth, value in enumerate(survival.tolist(), 1):
        path = tuple(chain[:depth].tolist())
        expected[path] = max(expected.get(path, -np.inf), value)
    assert paths(both) == expected
    assert int(both.num_nodes) == len(expected)
    assert both.parents[0, 0] == -1 and (both.parents[0, 1:] < torch.arange(1, 40)).all()
    assert (both.log_survival[0, 1:] <= both.log_survival[0, :-1]).all()
    named = list(zip(paths(both), both.source[0].tolist(), strict=False))
    copied = [tuple(chain[:depth].tolist()) for depth in range(1, 10)]
    assert [path for path, source in named if source] == copied
    assert not {path for path, source in named if source == FROM_LOOKUP} & set(paths(tree))
    assert seed % 2 == 0 or FROM_BOTH in both.source
    cut = join(tree.prefix(12), chain[None], survival[None], 9).prefix(6)
    assert list(paths(cut)) == list(paths(both))[:6]
    assert torch.equal(cut.parents, both.parents[:, :6])


@pytest.mark.parametrize("seed", range(6))
def test_more_columns_than_the_trees_have(seed: int) -> None:
    """As if the trees were padded before: live nodes are equal, the others can't survive."""
    rng, (batch, nodes, size) = np.random.default_rng(seed), (3, 6, 9)
    each = [random_tree(rng, int(rng.integers(1, 7)), nodes) for _ in range(batch)]
    columns = zip(*(vars(tree).values() for tree in each), strict=True)
    trees = DraftTrees(*map(torch.cat, columns))
    chain = rng.integers(0, VOCAB, (batch, size))
    survival = rng.choice([0.0, -0.25, -0.5], (batch, size)).cumsum(1).astype(np.float32)
    for row, end in enumerate(rng.integers(0, size, batch)):  # as `Lookup` ends them
        chain[row, end:], survival[row, end:] = -1, -np.inf
    survival[0, 0], chain[0, 0] = 0.0, 1
    for num_nodes in (nodes + 1, nodes + size, nodes + size + 7):
        got = join(trees, chain, survival, nodes, num_nodes)
        wanted = join(trees.padded(num_nodes), chain, survival, nodes)
        live = torch.arange(num_nodes) < wanted.num_nodes[:, None]
        assert torch.equal(got.log_survival.isfinite(), live)
        for name, part in vars(wanted).items():
            assert torch.equal(getattr(got, name)[live], part[live]), name
        assert (got.token_ids >= 0).all() and (got.parents[:, 1:] >= 0).all()


def test_only_levels_of_the_trees_are_shared() -> None:
    """A chain may be joined with the first levels only."""
    tree = DraftTrees.of(
        torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[0.0, -1.0, -2.0]])
    ).padded(5)
    chain, survival = np.array([[1, 2, 3]]), np.array([[-0.5, -0.6, -0.7]], np.float32)
    assert join(tree, chain, survival, 2).source.tolist() == [[0, 1, 1, 2, 0]]
    assert int(join(tree, chain, survival, 1).num_nodes) == 5  # 1 is shared, 2 is not


def extend(lookup: Lookup, text: list[int], depth: int = 9) -> list[int]:
    """The drafts of a request without other drafts."""
    texts, length = table([text])
    roots = DraftTrees.roots(1, 1 + lookup.max_tokens, "cpu")
    tree = lookup.extend(ONE, texts, ONE, length, roots, np.array([depth]), GREEDY, 0)
    return tree.token_ids[0, 1 : int(tree.num_nodes)].tolist()


def learn(lookup: Lookup, text: list[int], num_new: int) -> None:
    texts, length = table([text])
    lookup.learn(ONE, texts, ONE, length, np.array([num_new]))


def test_acceptance_is_learned_from_later_tokens() -> None:
    lookup, text = Lookup(100, 1, 63, None), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert extend(lookup, text, 4) == [4, 5, 6, 1]
    before = lookup.chances.copy()
    for _ in range(20):
        learn(lookup, [*text, 4, 9], 2)
        extend(lookup, text, 4)
        learn(lookup, [*text, 0, 0, 0, 4], 1)  # another text, without a continuation
        extend(lookup, text, 4)
    after = lookup.chances
    once = AGREEMENTS // 3  # one occurrence, which agrees
    third, fourth = (AGREEMENTS * bucket + once for bucket in (2, 3))  # after 3 tokens, after 4
    assert after[third] > 0.8 > before[third] and after[fourth] < 0.6 * before[fourth]
    assert (np.delete(after, [third, fourth]) == np.delete(before, [third, fourth])).all()
    lookup.forget()
    assert (lookup.chances == before).all()


def test_a_continuation_ends_before_placeholders() -> None:
    for placeholder in (99, 10, -1):
        assert extend(Lookup(10, 1, 8, None), [1, 2, 5, placeholder, 1, 2]) == [5]


def test_no_copy_is_certain() -> None:
    lookup, text = Lookup(10, 1, 1, None), [1] * 50
    for _ in range(2000):
        extend(lookup, text)
        learn(lookup, [*text, 1], 1)
    texts, length = table([text])
    roots = DraftTrees.roots(1, 2, "cpu")
    tree = lookup.extend(ONE, texts, ONE, length, roots, np.array([1]), GREEDY, 0)
    assert lookup.chances.max() == pytest.approx(0.995)
    assert tree.log_survival[0, 1].exp() == pytest.approx(0.995)


def test_observed_frequencies_are_used() -> None:
    """By length of the match and by agreement, regardless of the prior."""
    rng, lookup = np.random.default_rng(0), Lookup(1000, 1, 3, None)
    chances = {(2, 0): 0.9, (5, 0): 0.2, (5, 9): 0.7, (12, 0): 0.5}
    for _ in range(3000):
        matched, others = list(chances)[rng.integers(len(chances))]
        same = rng.choice(np.arange(100, 900), matched, replace=False).tolist()
        text = [same[-1], 905] * others + [*same, 901, 902, 903, 904, *same]
        extend(lookup, text)
        right = rng.random() < chances[matched, others]
        learn(lookup, [*text, 901 if right else 0], 1)
    once = AGREEMENTS // 3
    cells = [AGREEMENTS * 1 + once, AGREEMENTS * 3 + once, AGREEMENTS * 3, AGREEMENTS * 5 + once]
    assert np.abs(lookup.chances[cells] - list(chances.values())).max() < 0.15


@pytest.mark.parametrize("nodes", [3, 13])
def test_the_device_equals_the_host(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """Estimates in torch and in C++; Triton kernels are tested in `lookup/test_kernel`."""

    def find(texts: Any, rows: Any, lengths: Any, count: int) -> tuple[Any, ...]:
        arrays = (np.asarray(each) for each in (texts, rows, lengths))
        found = continuations(*arrays, count)
        return found if isinstance(texts, np.ndarray) else tuple(map(torch.from_numpy, found))

    def joined(trees: DraftTrees, chain: Any, survival: Any, *sizes: int) -> DraftTrees:
        return join(trees, np.asarray(chain), np.asarray(survival), *sizes)

    monkeypatch.setattr(lookup_module, "continuations", find)
    monkeypatch.setattr(lookup_module, "join", joined)
    rng, rows = np.random.default_rng(3), np.array([2, 0, 3, 1])
    texts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 9, 30, 60)]
    host, device = (Lookup(VOCAB, 8, nodes - 1, each) for each in (None, torch.device("cpu")))
    slots, sampled = np.array([6, 0, 3, 2]), np.array([True, False, False, True])
    for _ in range(40):
        num_new = rng.integers(0, 5, 4)  # may exceed the continuation
        for text, count in zip(texts, num_new, strict=True):
            text += text[-9:][:count]
        by_row, by_length = table([texts[place] for place in rows.argsort()])
        args = slots, by_row, rows, by_length[rows]
        depth, trees = rng.integers(0, nodes + 1, 4), DraftTrees.roots(4, nodes, "cpu")
        host.learn(*args, np.array([min(n, len(t)) for n, t in zip(num_new, texts, strict=True)]))
        on_device = [torch.from_numpy(each) for each in (*args, num_new)]
        device.learn(*on_device)
        wanted = host.extend(*args, trees, depth, sampled, 0)
        more = (torch.from_numpy(each) for each in (depth, sampled))
        got = device.extend(*on_device[:4], trees, *more, 0)
        assert torch.equal(got.token_ids, wanted.token_ids)
        torch.testing.assert_close(got.log_survival, wanted.log_survival)
        np.testing.assert_allclose(device.chances.numpy(), host.chances, rtol=1e-5)
    assert host.chances.max() > 0.95


def test_a_batch_equals_single_requests() -> None:
    """Trees of other tokens, rows that differ from slots."""
    rng, nodes, batch = np.random.default_rng(3), 13, 4
    slots, rows, copied = np.array([6, 0, 3, 2]), np.array([1, 3, 0, 2]), 0
    sampled = np.array([True, False, False, True])
    for _ in range(20):
        texts = [rng.integers(0, VOCAB, n).tolist() for n in (2, 9, 30, 60)]
        tokens, by_length = table([texts[place] for place in rows.argsort()])
        depth = rng.integers(0, nodes + 1, batch)
        each = [random_tree(rng, int(rng.integers(1, 10)), nodes) for _ in texts]
        columns = zip(*(vars(trees).values() for trees in each), strict=True)
        trees = DraftTrees(*map(torch.cat, columns))
        lookup = Lookup(VOCAB, 8, nodes - 1, None)
        got = lookup.extend(slots, tokens, rows, by_length[rows], trees, depth, sampled, nodes)
        for row, text in enumerate(texts):
            alone, one = Lookup(VOCAB, 1, nodes - 1, None), table([text])
            wanted = alone.extend(
                ONE, one[0], ONE, one[1], each[row], depth[[row]], sampled[[row]], nodes
            )
            assert paths(got, row) == pytest.approx(paths(wanted))
            copied += int((got.source[row] > 0).sum())
    assert copied > 100
