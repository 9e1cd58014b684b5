"""What trees accept on calibrated texts, and the search for the best tree."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assets import code_prompts, trained_model
from support.data import observed

from vllm_medusa.calibration.calibrate import measure_accuracy
from vllm_medusa.calibration.choose import best_tree
from vllm_medusa.calibration.collect import collect
from vllm_medusa.calibration.observations import NO_LABEL
from vllm_medusa.calibration.walks import Walks, walk_taus, walked_tree
from vllm_medusa.decode import decode
from vllm_medusa.files import Run
from vllm_medusa.offline.records import Record
from vllm_medusa.training.target import Target
from vllm_medusa.tree import TokenTree

HEADS, RANKS = 2, 3
TREES = (
    TokenTree.dense([2, 2, 1]).paths,
    TokenTree.chain(3).paths,
    ((1,), (1, 2), (0,), (1, 2, 0)),
    ((0,),),
)


def by_hand(texts, tree):
    """Each step of decoding texts, which are ranks [n, K]: its row and the accepted path."""
    nodes, steps = set(tree), []
    for text in texts:
        at = 0
        while at < len(text):
            path = ()
            while len(path) < len(text[at]) and (*path, int(text[at][len(path)])) in nodes:
                path = (*path, int(text[at][len(path)]))
            steps.append((text[at], path))
            at += 1 + len(path)
    return steps


def tau_by_hand(texts, tree):
    steps = by_hand(texts, tree)
    return sum(1 + len(path) for _, path in steps) / len(steps)


def random_texts(seed):
    rng = np.random.default_rng(seed)
    shapes = [(int(rng.integers(0, 30)), 3) for _ in range(5)] + [(7, 3)]
    return [rng.integers(-1, 3, shape) for shape in shapes]  # -1: no token


@given(st.integers(0, 10**6), st.sampled_from(TREES))
@settings(max_examples=60)
def test_visits_and_tau_are_those_of_walks_by_hand(seed, tree):
    texts = random_texts(seed)
    walks = Walks(texts, tree)
    paths = [path for _, path in by_hand(texts, tree)]
    assert walks.tau() == pytest.approx(tau_by_hand(texts, tree))
    for node, visits in zip([(), *tree], walks.visits(), strict=True):
        assert visits == sum(path[: len(node)] == node for path in paths)
    assert len(walks.visited()) == len(paths)


def test_an_absent_token_is_a_miss_for_every_rank():
    texts = [np.array([[0, -1, -1]] * 6)]
    assert walk_taus(texts, walked_tree(texts, 9, 3)) == [2.0] * 9
    walks = Walks(texts)
    assert walks.tau_with([(0,)]) == [2.0]


texts_of_ranks = st.lists(
    st.lists(st.tuples(*[st.integers(0, RANKS)] * HEADS), max_size=20), min_size=1, max_size=5
).filter(any)


def arrays(texts):
    return [np.array(text, dtype=np.int64).reshape(-1, HEADS) for text in texts]


def grown(texts, size, max_rank):
    """The tree of ``size`` nodes, and tau of each of its prefixes."""
    paths = walked_tree(arrays(texts), size, max_rank)
    return paths, walk_taus(arrays(texts), paths)


@given(texts_of_ranks, st.integers(1, 6))
@settings(max_examples=60)
def test_every_node_is_the_best_next_one(texts, size):
    """Each prefix has the tau of a manual walk, and no other candidate would give more."""
    paths, taus = grown(texts, size, RANKS)
    assert len(paths) == len(taus) == size
    TokenTree(tuple(paths))  # valid, parents first
    for count in range(size):
        tree = paths[: count + 1]
        assert taus[count] == pytest.approx(tau_by_hand(texts, tree))
        assert Walks(arrays(texts), tree).tau() == pytest.approx(taus[count])
        parents = [(), *paths[:count]]
        widths = {p: sum(q[:-1] == p for q in paths[:count]) for p in parents}
        rivals = [(*p, w) for p, w in widths.items() if len(p) < HEADS and w < RANKS]
        best = max(tau_by_hand(texts, [*paths[:count], rival]) for rival in rivals)
        assert taus[count] == pytest.approx(best)


def test_the_search_stops_when_the_heads_offer_no_more():
    paths, taus = grown([[(0, 0)] * 9], 50, 2)
    assert len(paths) == 2 + 4
    assert set(paths) == {(a,) for a in range(2)} | set(itertools.product(range(2), repeat=2))
    assert taus[-1] == 3.0


def test_the_shallower_of_equal_candidates_is_chosen():
    paths = walked_tree([np.full((5, 2), -1)], 4, 2)
    assert paths == [(0,), (1,), (0, 0), (0, 1)]


def test_empty_texts_are_refused():
    with pytest.raises(ValueError, match="longer texts"):
        walked_tree(arrays([[]]), 3, 2)


def test_the_value_of_every_size_equals_its_walks():
    rng = np.random.default_rng(0)
    found = observed(rng.geometric(0.45, (6 * 60, 3)) - 1, [60] * 6)
    chosen = best_tree(found, 8)
    texts, width = found.texts(), found.num_ranks
    assert chosen.paths == walked_tree(texts, 8, width)
    halves = [found.texts(half) for half in found.halves()]
    for size in range(1, 9):
        assert chosen.walked[size - 1] == Walks(texts, chosen.paths[:size]).tau()
        crossed = [
            Walks(other, walked_tree(own, 8, width)[:size]).tau()
            for own, other in (halves, halves[::-1])
        ]
        assert chosen.heldout[size - 1] == pytest.approx(np.mean(crossed))
    alone = observed(found.ranks[:60], [60])
    assert best_tree(alone, 8).heldout is None, "a single prompt is not split"


SHALLOW = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]


def test_accuracy_is_counted_where_decoding_looks():
    """Of each head in the steps that reach it, without absent labels."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 40, 12)
    ranks = rng.choice([0, 1, 2, 6], (lengths.sum(), 3), p=[0.5, 0.2, 0.1, 0.2])
    for end in np.cumsum(lengths)[:3]:  # texts that ended
        ranks[end - 1, 1:] = NO_LABEL
        ranks[end - 2, 2:] = NO_LABEL
    found = observed(ranks, lengths, 4)
    wanted = [[], [], []]
    for row, path in by_hand(found.texts(), SHALLOW):
        for depth in range(1 + len(path)):
            if any(node[:-1] == path[:depth] for node in SHALLOW) and row[depth] != NO_LABEL:
                wanted[depth].append(int(row[depth]))
    measured = measure_accuracy(found, Walks(found.texts(), SHALLOW))
    assert measured["counted_positions"] == list(map(len, wanted))
    for own, shares in zip(wanted, measured["accuracy"], strict=True):
        assert np.allclose(shares, [own.count(r) / len(own) for r in range(4)], atol=1e-4)
    first = measure_accuracy(found, Walks(found.texts(), [(0,)]))  # the others are not reached
    assert first["counted_positions"][1:] == [0, 0]
    assert first["accuracy"][1:] == [[None] * 4] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_walks_of_the_targets_own_text_equal_decoding(tmp_path, temperature):
    """With the test model's target and heads, step by step."""
    model, heads = trained_model()
    tree, texts, accepted = TokenTree.dense([4, 3, 2, 1]), [], []
    for number, ids in enumerate(code_prompts(0, 3)):
        generator = torch.Generator().manual_seed(number)
        options = {"temperature": temperature, "generator": generator, "eos_token_id": 1}
        result = decode(model, heads, tree, torch.tensor(ids), 60, **options)
        tokens = (*ids, *result.token_ids)
        spans = ((len(ids), len(tokens)),)
        texts.append(Record(number, 1, "", tokens, spans, temperature))
        accepted.append(result.accepted_per_step)

    with Run(tmp_path / "part", {}, of=tmp_path) as run:
        observations, _ = collect(texts, heads, Target(model), run)
    compared = total = 0
    order = sorted(range(len(texts)), key=lambda text: -len(texts[text].token_ids))
    for rows, steps in zip(observations.texts(), [accepted[text] for text in order], strict=True):
        walks = Walks([rows], tree.paths)
        walked = (walks.jumps[walks.visited()] - 1).tolist()
        assert walked == steps[: len(walked)]
        assert len(steps) - len(walked) <= heads.num_heads, "only where labels ran out"
        compared += len(walked)
        total += sum(walked)
    assert compared > 60 and total > 15, "too few steps for a comparison"
