"""The kernel for EAGLE-3 on CPUs against the builder with dense forward passes of every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import gather_tokens
from support.eagle import Eagle3

from vllm_medusa.noise import Noise, Seeds
from vllm_medusa.proposer.beam import beam_call
from vllm_medusa.proposer.build import build_tree
from vllm_medusa.proposer.choices import Choices, read_choices_in_torch
from vllm_medusa.proposer.eagle_cpu import EagleBeam, EagleCache, EagleWeights
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.tree.draft_trees import IMPOSSIBLE
from vllm_medusa.tree.dynamic import Beam

HIDDEN, VOCAB, HEADS, KEY_HEADS, SIZE, BLOCK = 48, 90, 4, 2, 32, 32
LENGTHS = [3, 40, 11, 33]  # exact entries of each request


VARIANTS = {
    "EAGLE-3": lambda drafter: None,
    "EAGLE-3.1": Eagle3.add_norms,
    "last state": Eagle3.read_last,
    "window": lambda drafter: setattr(drafter, "window", 8),
    "normed residual": lambda drafter: setattr(drafter, "norm_before_residual", True),
}


def random_drafter(seed: int, variant: str = "EAGLE-3") -> Eagle3:
    torch.manual_seed(seed)
    ids = torch.randperm(VOCAB)[:61].sort().values
    drafter = Eagle3(torch.randn(VOCAB, HIDDEN), ids, (1, 2, 3), HEADS, KEY_HEADS, SIZE)
    VARIANTS[variant](drafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) / 10)
    return drafter


def weights_of(drafter: Eagle3, dtype: torch.dtype = torch.float32) -> EagleWeights:
    layer, half = drafter.midlayer, SIZE // 2
    attention, mlp = layer.self_attn, layer.mlp
    angles = torch.arange(64)[:, None] * 10000 ** (-torch.arange(half) / half)
    return EagleWeights(
        fc=None if drafter.reads_last else drafter.fc.weight,
        qkv=torch.cat([attention[f"{name}_proj"].weight for name in "qkv"]),
        out=attention["o_proj"].weight,
        gate_up=torch.cat([mlp["gate_proj"].weight, mlp["up_proj"].weight]),
        down=mlp["down_proj"].weight,
        lm_head=drafter.lm_head.weight,
        embedding_norm=layer.input_layernorm.weight,
        state_norm=layer.hidden_norm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        last_norm=drafter.norm.weight,
        rope=torch.cat([angles.cos(), angles.sin()], -1),
        embedding=drafter.embedding.to(dtype),
        token_map=drafter.target_ids,
        num_heads=HEADS,
        num_kv_heads=KEY_HEADS,
        eps=1e-6,
        norm_before_residual=drafter.norm_before_residual,
        norm_output=drafter.norm_output,
        fc_norms=tuple(norm.weight for norm in drafter.fc_norm),
    )


class Dense:
    """The drafter by a dense forward pass for each node."""

    def __init__(self, drafter: Eagle3, tokens: list, features: list, noise: Noise | None) -> None:
        self.drafter, self.tokens, self.features, self.noise = drafter, tokens, features, noise
        self.paths = [[[]] for _ in tokens]

    def expand(self, level, tokens, parents, width) -> Choices:
        logits = []
        for b, (row, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            if level:
                pairs = zip(above, row, strict=True)
                self.paths[b] = [[*self.paths[b][parent], token] for parent, token in pairs]
            given = self.tokens[b], self.features[b]
            logits.append(
                torch.stack([self.drafter.dense(*given, path)[0] for path in self.paths[b]])
            )
        scores = torch.stack(logits)
        if self.noise is not None:
            scores = self.noise.at(level, level + 1).scores(scores)
        return read_choices_in_torch(scores, width, None, self.drafter.target_ids)


class Served:
    """The kernel with a cache of shuffled blocks, whose unwritten slots are NaN."""

    def __init__(self, drafter, batch, isa="vec", dtype=torch.float32, exact=True) -> None:
        self.kernel = EagleBeam(weights_of(drafter, dtype), exact=exact)
        blocks = 3 * batch
        data = torch.full((blocks, KEY_HEADS, BLOCK, 2 * SIZE), torch.nan, dtype=dtype)
        layout = CacheLayout.of(data, isa)
        self.isa, self.table = isa, torch.randperm(blocks).int().view(batch, 3)
        self.cache = EagleCache.of(data, layout, truncate=False, window=drafter.window)

    def slots(self, row: int, places: torch.Tensor) -> torch.Tensor:
        return self.table[row, places // BLOCK].long() * BLOCK + places % BLOCK

    def prefill(self, tokens, features, first: list[int], stop: list[int], depth=0, width=HIDDEN):
        """Entries ``first`` to ``stop`` - 1 of each request, the last ``depth`` as accepted nodes.

        Each accepted node comes after a rejected one; the number of nodes differs by request.
        ``width`` is that of the target's states.
        """
        rows, ids, states, nodes = [], [], [], []
        for b, (start, end) in enumerate(zip(first, stop, strict=True)):
            accepted = min(max(depth - b, 0), end - start - 1)
            plain = end - start - accepted
            rows.append((len(ids), plain, start))
            for i in range(start, end):
                if i >= start + plain:
                    ids.append(-1)
                    states.append(torch.full_like(features[b][0], torch.nan))
                ids.append(int(tokens[b][i - 1]) if i else -1)
                states.append(features[b][i])
            nodes.append([2 * min(d, accepted) for d in range(depth + 1)])
        given = torch.stack(states).unflatten(1, (-1, width)).unbind(1)
        last = torch.tensor(nodes)[:, -1]
        return self.kernel.prefill(
            self.cache, self.table, np.array(rows).T.copy(),
            (torch.tensor(nodes), last // 2) if depth else None,
            torch.tensor(ids, dtype=torch.int32),
            torch.stack([tokens[b][end - 1] for b, end in enumerate(stop)]), given,
        )  # fmt: skip


def inputs(batch: int, drafter: Eagle3) -> tuple[list, list, list[int]]:
    ends, states = LENGTHS[:batch], len(drafter.layers) or 1
    tokens = [torch.randint(0, VOCAB, (end,)) for end in ends]
    return tokens, [torch.randn(end, states * HIDDEN) for end in ends], ends


@pytest.mark.parametrize(
    ("isa", "dtype", "tolerance"),
    [("vec", torch.float32, 1e-4), ("vec", torch.bfloat16, 0.06), ("amx", torch.bfloat16, 0.06)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_entries_are_those_of_a_dense_pass(isa, dtype, tolerance, variant) -> None:
    drafter = random_drafter(1, variant)
    tokens, features, ends = inputs(4, drafter)
    served = Served(drafter, 4, isa, dtype)
    cut = [end // 3 for end in ends]
    served.prefill(tokens, features, [0] * 4, cut, width=HIDDEN // 2)  # not of whole vectors
    normed, hidden = served.prefill(tokens, features, cut, ends, depth=4)
    for b, end in enumerate(ends):
        with torch.no_grad():
            states = drafter.combine(features[b])[None]
            wanted = drafter.step(tokens[b][None], states)
        for found, dense in ((normed, wanted[0]), (hidden, wanted[1])):
            torch.testing.assert_close(found[b], dense[0, -1], atol=tolerance, rtol=tolerance)
        slots = served.slots(b, torch.arange(end))
        stored = gather_tokens(served.cache.tensor, isa, slots)
        for found, dense in zip(stored, wanted[2], strict=True):
            dense = dense[0].transpose(0, 1)
            torch.testing.assert_close(found.float(), dense, atol=tolerance, rtol=tolerance)
        rest = gather_tokens(served.cache.tensor, isa, served.slots(b, torch.arange(end, 64)))
        assert rest[0].isnan().all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    beam=st.builds(
        Beam, width=st.integers(1, 5), choices=st.integers(1, 6), depth=st.integers(1, 4)
    ),
    depths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_nodes=st.integers(2, 30),
    limit=st.none() | st.integers(1, 12),
    noisy=st.booleans(),
    variant=st.sampled_from(sorted(VARIANTS)),
)
def test_drafts_what_the_builder_drafts(
    seed, beam, depths, num_nodes, limit, noisy, variant
) -> None:
    drafter, batch = random_drafter(seed, variant), len(depths)
    tokens, features, ends = inputs(batch, drafter)
    depth, root, noise = torch.tensor(depths), torch.stack([each[-1] for each in tokens]), None
    if noisy:
        temperature = torch.linspace(0, 1.2, batch)  # the first is greedy
        stream = Seeds(torch.arange(beam.depth * batch).view(batch, beam.depth), temperature)
        noise = Noise(stream, drafter.target_ids)
    dense = Dense(drafter, tokens, features, noise)
    expected = build_tree(dense, beam, root, num_nodes, depth, limit)
    served = Served(drafter, batch)
    states = served.prefill(tokens, features, [0] * batch, ends)
    call = beam_call(beam, root, num_nodes, depth, limit, noise and noise.at(0, beam.depth))
    found = served.kernel.draft(served.cache, served.table, *states, torch.tensor(ends), call)
    assert found is not None
    if limit is not None:  # drafts beyond it depend on the neighbors
        expected, found = expected.limited(limit), found.limited(limit)
    possible = expected.log_survival > IMPOSSIBLE
    assert torch.equal(found.log_survival > IMPOSSIBLE, possible)
    torch.testing.assert_close(found.log_survival, expected.log_survival, atol=1e-3, rtol=1e-4)
    for name in ("token_ids", "parents"):
        assert torch.equal(getattr(found, name)[possible], getattr(expected, name)[possible])


@pytest.mark.parametrize(
    ("isa", "dtype"), [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)]
)
def test_the_rounding_of_weights_to_int8_is_small(isa, dtype) -> None:
    beam, drafter = Beam(4, 4, 3), random_drafter(2)
    tokens, features, ends = inputs(4, drafter)
    root, depth = torch.stack([each[-1] for each in tokens]), torch.full((4,), 3)
    expected = build_tree(Dense(drafter, tokens, features, None), beam, root, 12, depth)
    served = Served(drafter, 4, isa, dtype, exact=False)
    states = served.prefill(tokens, features, [0] * 4, ends)
    call = beam_call(beam, root, 12, depth)
    found = served.kernel.draft(served.cache, served.table, *states, torch.tensor(ends), call)
    assert (found.log_survival - expected.log_survival).abs().max() < 0.2
    assert (found.token_ids == expected.token_ids).float().mean() > 0.7


def test_no_drafts_for_non_finite_states() -> None:
    served = Served(random_drafter(3), 1)
    states = torch.full((2, 1, HIDDEN), torch.nan)
    call = beam_call(Beam(2, 2, 2), torch.tensor([1]), 5, torch.tensor([2]))
    assert served.kernel.draft(served.cache, served.table, *states, torch.tensor([3]), call) is None
