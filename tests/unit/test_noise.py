"""The noise known ahead is what the sampler will use, and drafts gain from it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.assets import code_prompts, trained_model

from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.noise import (
    LevelNoise,
    Noise,
    Seeds,
    gumbel_argmax,
    next_seeds,
    own_generator,
    splitmix_gumbel,
)
from vllm_medusa.sampler import draw_splitmix
from vllm_medusa.tree.presets import load_preset


def test_the_kernel_computes_the_samplers_noise() -> None:
    seeds = torch.tensor([[5, 2**31 - 1, 0], [77, -1, 123456789]])
    ids = torch.randperm(150_000)
    found = Seeds(seeds, torch.ones(2)).gumbel(0, 3, ids)
    expected = splitmix_gumbel(seeds.clamp_min(0).unsqueeze(-1), ids)
    expected[seeds < 0] = 0.0
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=0)
    assert expected.max() > 11  # the tail that decides draws


def test_a_draw_is_the_largest_sum_with_the_noise_known_ahead() -> None:
    generator = torch.Generator().manual_seed(3)
    ahead, logits = next_seeds(generator, 5), torch.randn(5, 999)
    noise = Seeds(ahead[None], torch.ones(1)).gumbel(0, 5, torch.arange(999))[0]
    drawn = [int(draw_splitmix(row, generator)) for row in logits]
    assert drawn == (logits + noise).argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [5, 4096, 49_152, 151_937])
def test_the_token_drawn_is_found_by_vectors(vocab) -> None:
    """Or left undecided, where the two largest sums are close."""
    torch.manual_seed(vocab)
    seeds, logits = torch.randint(0, 2**31, (64,)), 2 * torch.randn(64, vocab)
    logits[::4, 3:] = -torch.inf
    sums = logits.double() + splitmix_gumbel(seeds[:, None], torch.arange(vocab))
    found, (two, wanted) = gumbel_argmax(logits, seeds), sums.topk(2)
    clear = two[:, 0] - two[:, 1] > 2e-4
    assert clear.sum() > 60 and torch.equal(found[clear], wanted[clear, 0])


def test_close_sums_are_left_undecided() -> None:
    seeds, logits = torch.arange(8), torch.randn(8, 5000)
    sums = logits.double() + splitmix_gumbel(seeds[:, None], torch.arange(5000))
    best, order = sums.topk(2)
    for row, gap in enumerate((0.0, 1e-5, -1e-5, 5e-5, 2e-4, 1e-3, 1.0)):
        logits[row, order[row, 1]] += best[row, 0] - best[row, 1] + gap
    logits[7] = -torch.inf
    found = gumbel_argmax(logits, seeds).tolist()
    assert found[:4] == [-1] * 4 and found[7] == -1
    assert found[4:7] == order[4:7, 1].tolist()


def test_requests_without_a_seed_have_more_streams_than_there_are_seeds() -> None:
    """A CPU generator uses 32 bits of its seed, so its seed must not determine the stream."""
    alike = [torch.Generator().manual_seed(seed) for seed in (5, 5 + (7 << 32))]
    assert next_seeds(alike[0], 50).equal(next_seeds(alike[1], 50))

    def draws(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 2**31, (2000,), generator=generator)

    torch.manual_seed(1)
    found = [own_generator(), own_generator()]
    seeds = [generator.initial_seed() & (2**32 - 1) for generator in found]
    again = [torch.Generator().manual_seed(seed) for seed in seeds]
    streams = [draws(each) for each in (*found, *again[:1])]
    for index, one in enumerate(streams):
        for other in streams[:index]:
            assert (one == other).sum() < 3
        bits = (one[:, None] >> torch.arange(31)) & 1
        assert (bits.double().mean(0) - 0.5).abs().max() < 0.06  # 5 standard deviations
    torch.manual_seed(1)
    assert draws(own_generator()).equal(streams[0])


def test_greedy_requests_have_the_same_scores_in_a_mixed_batch() -> None:
    logits, sharpness = torch.randn(2, 3, 50).bfloat16(), torch.tensor([1.0, 0.5, 2.0])
    stream = Seeds(torch.tensor([[-1, -1, -1], [1, 2, 3]]), torch.tensor([0.0, 1.0]))
    scores = Noise(stream, torch.arange(50)).at(0, 3).scores(logits, sharpness)
    own = logits.float() * sharpness[:, None]
    assert torch.equal(scores[0], own[0]) and not torch.equal(scores[1], own[1])


def test_padding_columns_have_no_scores() -> None:
    noise = LevelNoise(torch.zeros(1, 1, 40), torch.ones(1), torch.ones(1))
    assert noise.scores(torch.randn(1, 6, 64)).shape == (1, 6, 40)


@pytest.fixture(scope="module")
def sampled() -> Any:
    model, heads = trained_model()

    def run(**options: Any) -> list[DecodeResult]:
        return [
            decode(
                model, heads, load_preset("mc_sim_7b_63"), torch.tensor(prompt), 40,
                temperature=1.0, generator=torch.Generator().manual_seed(seed),
                draw=draw_splitmix, **options,
            )
            for seed, prompt in enumerate(code_prompts(0, 8))
        ]  # fmt: skip

    return run


def mean_accepted(results: list[DecodeResult]) -> float:
    counts = [count for result in results for count in result.accepted_per_step]
    return sum(counts) / len(counts)


def test_more_drafts_are_accepted_and_no_token_changes(
    sampled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: other noise loses only the gain; noise drawn early changes tokens."""
    without, shared = sampled(shared_noise=False), sampled()
    tokens = [result.token_ids for result in without]
    assert [result.token_ids for result in shared] == tokens
    assert mean_accepted(shared) > 1.15 * mean_accepted(without)
    for wrong in (
        lambda generator, count: next_seeds(generator, count + 1)[1:],  # the next position's
        lambda generator, count: torch.arange(count),  # another stream's
    ):
        monkeypatch.setattr(sys.modules["vllm_medusa.decode"], "next_seeds", wrong)
        found = sampled()
        assert [result.token_ids for result in found] == tokens
        assert mean_accepted(found) < 1.02 * mean_accepted(without)
    early = lambda generator, count: torch.randint(0, 2**31, (count,), generator=generator)  # noqa: E731
    monkeypatch.setattr(sys.modules["vllm_medusa.decode"], "next_seeds", early)
    assert [result.token_ids for result in sampled()] != tokens
