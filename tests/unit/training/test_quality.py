"""Quality of a trained target: against explicit sums, and its bounds."""

import math

import pytest
import torch

from vllm_medusa.training.options import JointOptions
from vllm_medusa.training.quality import QualityMeter, shortfalls
from vllm_medusa.training.rows import IGNORED

T, H, V = 23, 8, 40


def texts() -> list[tuple[torch.Tensor, ...]]:
    """(next tokens, states before, states after) of two texts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        following = torch.randint(V, (T,), generator=generator)
        following[torch.rand(T, generator=generator) < 0.4] = IGNORED
        before, after = torch.randn(2, T, H, generator=generator)
        found.append((following, before, after))
    return found


def lm_head() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(H, V)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_equals_the_definition_position_by_position(chunk, monkeypatch):
    monkeypatch.setattr("vllm_medusa.training.quality.CHUNK", chunk)
    head = lm_head()
    meter = QualityMeter(head)
    old_nats = new_nats = kl = reverse = 0.0
    count = 0
    for following, before, after in texts():
        meter.add(following, before, after)
        for t, label in enumerate(following.tolist()):
            if label == IGNORED:
                continue
            p = head(before[t]).double().softmax(0).tolist()
            q = head(after[t]).double().softmax(0).tolist()
            old_nats -= math.log(p[label])
            new_nats -= math.log(q[label])
            kl += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
            reverse += sum(y * math.log(y / x) for x, y in zip(p, q, strict=True))
            count += 1
    quality = meter.result()
    assert quality["num_tokens"] == count
    expected = (math.exp(old_nats / count), math.exp(new_nats / count), kl / count)
    names = ("perplexity_before", "perplexity_after", "kl")
    got = tuple(quality[name] for name in names)
    assert got == pytest.approx(expected, rel=1e-5)
    assert quality["kl"] != pytest.approx(reverse / count, rel=1e-3)  # they differ


@pytest.mark.parametrize(
    ("kl", "ratio", "words"),
    [
        (0.02, 1.02, []),
        (0.03, 1.02, ["--max-kl"]),
        (0.02, 1.09, ["--max-perplexity-ratio"]),
        (0.03, 1.09, ["--max-kl", "--max-perplexity-ratio"]),
        (math.nan, math.nan, ["--max-kl", "--max-perplexity-ratio"]),
        (math.inf, math.inf, ["--max-kl", "--max-perplexity-ratio"]),
    ],
)
def test_bounds(kl, ratio, words):
    bounds = JointOptions(max_kl=0.025, max_perplexity_ratio=1.05)
    found = shortfalls({"kl": kl, "perplexity_ratio": ratio}, bounds)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_a_diverged_model_is_measured_and_an_empty_text_is_an_error():
    head = lm_head()
    meter = QualityMeter(head)
    following, before, after = texts()[0]
    meter.add(torch.full_like(following, IGNORED), before, after)
    with pytest.raises(ValueError, match="no generated token"):
        meter.result()
    after[7], following[7] = math.nan, 3
    meter.add(following, before, after)
    assert len(shortfalls(meter.result(), JointOptions())) == 2
