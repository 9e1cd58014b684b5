"""Lookup by itself: what is found, how it joins a tree, and what is believed of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_medusa.lookup import chances, on_device
from vllm_medusa.lookup.chances import Chances
from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.lookup.merge import BY_BOTH, BY_CHAIN, ROOT, DraftTree, merge
from vllm_medusa.lookup.on_device import DraftTrees, LookupOnDevice
from vllm_medusa.lookup.search import LONGEST, SHORTEST, continuation, longest_match

VOCAB = 5


def by_hand(tokens: list[int]) -> tuple[int, int]:
    last, best = len(tokens) - 1, (0, 0)
    for place in range(last):
        length = 0
        while length < min(LONGEST, place + 1) and tokens[place - length] == tokens[last - length]:
            length += 1
        if length >= SHORTEST and length >= best[0]:
            best = length, place + 1
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_and_latest_match_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = set()
    for length in range(60):
        tokens = rng.integers(0, VOCAB if seed % 2 else 2, length, dtype=np.int32)
        if length > 50:
            tokens[-20:] = tokens[5:25]
        assert longest_match(tokens) == by_hand(tokens.tolist())
        found.add(longest_match(tokens)[0])
    assert 0 in found and max(found) >= 20


def test_a_continuation_goes_in_a_circle_and_ends_before_what_is_no_token() -> None:
    tokens = np.array([7, 1, 2, 3, 1, 2])
    length, start = longest_match(tokens)
    assert (length, start) == (2, 3)
    assert continuation(tokens, start, 7, 10).tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert continuation(np.array([1, 2, 5, 99, 1, 2]), 2, 4, 10).tolist() == [5]
    assert longest_match(np.zeros(300, np.int32)) == (LONGEST, 299)


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    """Siblings with tokens of their own, values that often tie, in order."""
    tokens, parents, values = [0], [-1], [1.0]
    while len(tokens) < nodes:
        parent = int(rng.integers(len(tokens)))
        used = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        token = int(rng.integers(VOCAB))
        if token in used:
            continue
        tokens.append(token)
        parents.append(parent)
        values.append(values[parent] * float(rng.choice([1.0, 0.5])))
    order = np.argsort(-np.array(values), kind="stable")
    place = np.argsort(order)
    above = [-1, *(int(place[parents[node]]) for node in order[1:])]
    return DraftTree.of(np.array(tokens)[order], np.array(above), np.array(values)[order])


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tree.token_ids)):
        found[node] = (*found[int(tree.parents[node])], int(tree.token_ids[node]))
    return {path: float(tree.survival[node]) for node, path in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_both_are_one_tree(seed: int) -> None:
    """All paths of either with the surer survival, each once, best first, parents first."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 12)
    chain = rng.integers(0, VOCAB, 9)
    if seed % 2:  # it follows the tree at first
        chain[:2] = max(paths(tree), key=lambda path: (len(path) >= 2, len(path)))[:2]
    survival = rng.choice([1.0, 0.7, 0.5], 9).cumprod()
    both = merge(tree, chain, survival, 100)
    expected = paths(tree)
    for depth, value in enumerate(survival.tolist(), 1):
        path = tuple(chain[:depth].tolist())
        expected[path] = max(expected.get(path, 0.0), value)
    assert paths(both) == expected
    assert len(both.token_ids) == len(expected)
    assert (both.parents[1:] < np.arange(1, len(both.parents))).all()
    assert (np.diff(both.survival) <= 0).all()
    copied = [path for path, by in zip(paths(both), both.proposed_by, strict=True) if by]
    assert copied == [tuple(chain[:depth].tolist()) for depth in range(1, 10)]
    alone = [path for path, by in zip(paths(both), both.proposed_by, strict=True) if by == BY_CHAIN]
    assert not set(alone) & set(paths(tree)) and BY_BOTH in {*both.proposed_by, BY_BOTH}
    cut = merge(tree, chain, survival, 5)
    assert list(paths(cut)) == list(paths(both))[:6]
    assert (cut.parents == both.parents[:6]).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_believed_is_what_comes_true(sampled: bool) -> None:
    """Whatever the prior says; the other kind of request is left alone."""
    rng, known = np.random.default_rng(0), Chances()
    other = known.survival(2, 9, sampled=not sampled).copy()
    true = np.interp(np.arange(LONGEST + 1), [1, 8, LONGEST], [0.9, 0.3, 0.6])
    for _ in range(3000):
        matched = int(rng.integers(2, LONGEST + 1))
        agree = np.minimum(matched + np.arange(6), LONGEST)
        wrong = np.flatnonzero(rng.random(6) > true[agree])
        right = int(wrong[0]) if len(wrong) else 6
        known.learn(matched, right, ended=right < 6, sampled=sampled)
    for matched in (2, 3, 5, 8, 20, LONGEST):
        expected = true[np.minimum(matched + np.arange(4), LONGEST)].cumprod()
        assert np.abs(known.survival(matched, 4, sampled=sampled) - expected).max() < 0.12
    assert (known.survival(2, 9, sampled=not sampled) == other).all()


def test_requests_learn_from_what_they_said_next() -> None:
    lookup = Lookup(100)
    text = np.array([1, 2, 3, 4, 5, 6, 1, 2, 3])
    tree = lookup.extend("a", text, ROOT, 4, 63, sampled=False)
    assert tree.token_ids[1:].tolist() == [4, 5, 6, 1]  # no deeper than it is of use
    before = lookup.chances.survival(3, 3, sampled=False)
    for _ in range(20):
        lookup.learn("a", [4, 9])
        lookup.learn("b", [9])  # nothing was found for it
        lookup.extend("a", text, ROOT, 4, 63, sampled=False)
    after = lookup.chances.survival(3, 3, sampled=False)
    assert after[0] > before[0] and after[1] < 0.6 * before[1]


def padded(rows: list[np.ndarray], width: int, fill: float = 0) -> torch.Tensor:
    return torch.stack(
        [torch.from_numpy(np.pad(row, (0, width - len(row)), constant_values=fill)) for row in rows]
    )


def test_batches_on_the_device_are_as_requests_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts that grow step by step, trees of other tokens, slots that change hands."""
    for module in (chances, on_device):  # a batch ages what is known at once
        monkeypatch.setattr(module, "WINDOW", np.inf)
    rng, nodes, most, batch = np.random.default_rng(3), 10, 12, 5
    host, device = Lookup(VOCAB), LookupOnDevice(VOCAB, 8, most, "cpu")
    texts = [rng.integers(0, VOCAB, n) for n in (1, 2, 9, 30, 60)]
    names, slots = [*"abcde"], torch.tensor([6, 0, 3, 2, 7])
    sampled = np.array([True, False, False, True, False])
    copied = 0
    for step in range(40):
        if step == 20:  # another request in the slot
            names[1], texts[1] = "f", rng.integers(0, VOCAB, 25)
        counts = rng.integers(0, 4, batch)
        more = [
            text[-9:][:n] if step % 3 else rng.integers(0, VOCAB, n)
            for text, n in zip(texts, counts, strict=True)
        ]
        said = np.array([len(new) for new in more])
        texts = [np.concatenate(pair) for pair in zip(texts, more, strict=True)]
        depth = rng.integers(0, most + 2, batch)
        trees = [random_tree(rng, int(rng.integers(1, nodes + 1))) for _ in names]
        for name, text, n in zip(names, texts, said, strict=True):
            host.learn(name, text[len(text) - n :])
        wanted = [
            host.extend(name, text, tree, int(d), most, sampled=bool(s)) if d else tree
            for name, text, tree, d, s in zip(names, texts, trees, depth, sampled, strict=True)
        ]
        lengths = torch.tensor([len(text) for text in texts])
        table = torch.full((8, 300), VOCAB + 7, dtype=torch.int32)
        table[slots] = padded(texts, 300, VOCAB + 7).to(torch.int32)
        args = slots, table, lengths
        device.learn(*args, torch.from_numpy(said), torch.from_numpy(sampled))
        own = DraftTrees(
            padded([tree.token_ids for tree in trees], 1 + most),
            padded([tree.parents for tree in trees], 1 + most),
            padded([np.log(tree.survival) for tree in trees], 1 + most, -np.inf).float(),
            torch.zeros(batch, 1 + most, dtype=torch.int64),
        )
        got = device.extend(*args, own, torch.from_numpy(depth), torch.from_numpy(sampled), nodes)
        for row, tree in enumerate(wanted):
            count = len(tree.token_ids)
            assert int(got.log_survival[row].isfinite().sum()) == count
            np.testing.assert_allclose(
                got.log_survival[row, :count].exp(), tree.survival, rtol=1e-4
            )
            same = DraftTree(
                *(part[row, :count].numpy() for part in (got.token_ids, got.parents)),
                tree.survival,
                got.proposed_by[row, :count].numpy(),
            )
            assert paths(same).keys() == paths(tree).keys()
            assert same.num_copied == tree.num_copied
            copied += tree.num_copied
    assert copied > 200
