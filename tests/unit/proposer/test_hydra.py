"""Hydra in trees: choices are those of a dense pass over the node's path, also in the kernel."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.hydra import dense_logits, random_hydra

from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.noise import Noise, Seeds
from vllm_medusa.proposer.build import build_tree
from vllm_medusa.proposer.choices import read_choices_in_torch
from vllm_medusa.proposer.hydra import HydraBeam
from vllm_medusa.proposer.steps import HydraStep, propose_tree
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.draft_trees import IMPOSSIBLE
from vllm_medusa.tree.dynamic import Beam, DynamicTree

K, BATCH = 4, 2
TREES = [
    TokenTree.dense([3, 2, 2, 1]),
    TokenTree.chain(4),
    DynamicTree(Beam(4, 5, K), 20),
    DynamicTree(Beam(3, 3, K), 9, (0.5, 1.0, 1.5, 2.0)),
]


def setting():
    heads = random_hydra(K, 2, 16, 60)
    generator = torch.Generator().manual_seed(3)
    embedding, lm_head = torch.randn(2, 60, 16, generator=generator).unbind()
    heads.use_target_embedding(embedding)
    states = torch.randn(BATCH, 16, generator=generator)
    return heads, states, torch.tensor([5, 17]), embedding, lm_head


def paths(drafts, root, row):
    """Each node's tokens from the root on."""
    found = [[int(root[row])]]
    for node in range(1, int(drafts.num_nodes[row])):
        found.append([*found[int(drafts.parents[row, node])], int(drafts.token_ids[row, node])])
    return found


def disagreements(tree):
    """Number of nodes that are not a choice of a dense pass over their parent's path."""
    heads, states, root, embedding, lm_head = setting()
    drafts = propose_tree(heads, states, root, tree, lambda x: x @ lm_head.T)
    wrong = nodes = 0
    for row in range(BATCH):
        found = paths(drafts, root, row)
        children = {}
        for node, path in enumerate(found[1:], 1):
            children.setdefault(int(drafts.parents[row, node]), []).append(path[-1])
        for parent, tokens in children.items():
            logits = dense_logits(heads, states[row], found[parent], embedding, lm_head)
            best = logits.topk(len(tokens)).indices.tolist()
            wrong += len(set(tokens) - set(best))
            nodes += len(tokens)
    return wrong, nodes


@pytest.mark.parametrize("tree", TREES, ids=["dense", "chain", "dynamic", "sharpened"])
def test_nodes_equal_a_dense_pass_over_their_path(tree):
    wrong, nodes = disagreements(tree)
    assert wrong == 0 and nodes == BATCH * (tree.num_nodes - 1)


def test_a_siblings_token_is_detected(monkeypatch):
    """A head that reads its sibling's branch gives other choices."""
    expand = HydraStep.expand

    def wrong(self, level, tokens, parents, width):
        return expand(self, level, tokens.roll(1, 1), parents, width)

    monkeypatch.setattr(HydraStep, "expand", wrong)
    wrong, nodes = disagreements(TREES[0])
    assert wrong > nodes // 4


HIDDEN, VOCAB = 48, 203


def random_heads(dtype: torch.dtype, seed: int, **options) -> HydraHeads:
    """Heads with weights that int8 represents exactly: integers up to 127, times 2^-10."""
    torch.manual_seed(seed)
    heads = HydraHeads(3, 2, HIDDEN, VOCAB, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            whole = torch.randint(-126, 127, parameter.shape)
            if "bias" not in name:
                whole[..., 0] = 127
            parameter.copy_(whole / 2**10)
    return heads


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    beam=st.builds(
        Beam, width=st.integers(1, 6), choices=st.integers(1, 7), depth=st.integers(1, 3)
    ),
    depths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    num_nodes=st.integers(2, 40),
    limit=st.none() | st.integers(1, 12),
    options=st.sampled_from([{}, {"num_lm_heads": 3, "lm_head_bias": True}, {"mapped": 60}]),
    soft_cap=st.none() | st.just(3.0),
    noisy=st.booleans(),
)
def test_drafts_what_the_builder_drafts(
    seed, dtype, beam, depths, num_nodes, limit, options, soft_cap, noisy
):
    mapped = options.get("mapped")
    torch.manual_seed(seed)
    if mapped:
        options = {"token_map": torch.randperm(VOCAB)[:mapped].sort().values}
    heads = random_heads(dtype, seed, **options)
    embedding = torch.randn(VOCAB, HIDDEN).to(dtype)
    batch, depth = len(depths), torch.tensor(depths)
    states, root = torch.randn(batch, HIDDEN), torch.randint(0, VOCAB, (batch,))
    sharpness = torch.tensor([1.0, 0.7, 1.3])
    exact = dtype == torch.float32
    kernel = HydraBeam(heads, embedding, sharpness, soft_cap, exact=exact)
    assert HydraBeam.serves(heads, embedding, beam)

    noise = None
    if noisy:
        temperature = torch.linspace(0, 1.2, batch)  # the first is greedy
        stream = Seeds(torch.arange(3 * batch).view(batch, 3), temperature)
        ids = torch.arange(VOCAB) if heads.token_map is None else heads.token_map
        noise = Noise(stream, ids)

    def read(logits, width, factors, noise):
        if soft_cap:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        if noise is not None:
            logits, factors = noise.scores(logits, factors), None
        return read_choices_in_torch(logits, width, factors, heads.token_map)

    heads = heads.float()
    heads.use_target_embedding(embedding.float())

    def built(beam, size):
        step = HydraStep(heads, states, heads.embed, None, sharpness, read, noise)
        return build_tree(step, beam, root, size, depth, limit)

    expected = built(beam, num_nodes)
    # the order of near-ties depends on rounding: also of drafts that just miss the tree
    wide = built(Beam(beam.width + 1, beam.choices + 1, beam.depth), 64).log_survival
    gaps = wide.sort(-1).values.diff(dim=-1)
    assume(not bool(((gaps < 1e-3) & (wide.sort(-1).values[:, :-1] > IMPOSSIBLE)).any()))
    levels = noise and noise.at(0, 3)
    found = kernel.draft(states, root, beam, num_nodes, depth, limit, levels)
    if limit is not None:  # drafts beyond it depend on the neighbors
        expected, found = expected.limited(limit), found.limited(limit)
    possible = expected.log_survival > IMPOSSIBLE
    assert torch.equal(found.log_survival > IMPOSSIBLE, possible)
    torch.testing.assert_close(found.log_survival, expected.log_survival, atol=1e-4, rtol=1e-4)
    for name in ("token_ids", "parents"):
        assert torch.equal(getattr(found, name)[possible], getattr(expected, name)[possible])


def test_the_rounding_of_weights_to_int8_is_small():
    heads = random_heads(torch.bfloat16, 0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    embedding = torch.randn(VOCAB, HIDDEN).bfloat16()
    states, root, depth = torch.randn(4, HIDDEN), torch.arange(4), torch.full((4,), 3)
    found = HydraBeam(heads, embedding).draft(states, root, Beam(4, 4, 3), 12, depth)
    exact = heads.float()
    exact.use_target_embedding(embedding.float())
    expected = build_tree(HydraStep(exact, states, exact.embed), Beam(4, 4, 3), root, 12, depth)
    assert (found.log_survival - expected.log_survival).abs().max() < 0.1
    assert (found.token_ids == expected.token_ids).float().mean() > 0.8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_drafts_for_non_finite_states(bad):
    heads = random_heads(torch.float32, 0)
    states, root = torch.full((2, HIDDEN), bad), torch.tensor([1, 2])
    kernel = HydraBeam(heads, torch.randn(VOCAB, HIDDEN))
    assert kernel.draft(states, root, Beam(2, 2, 3), 5, torch.tensor([3, 3])) is None
