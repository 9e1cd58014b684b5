"""The chunked losses against a plain-torch implementation, and their compiled rows."""

import itertools

import pytest
import torch
import torch._inductor.config

from vllm_medusa import kernels
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.records import Record
from vllm_medusa.training import losses
from vllm_medusa.training.losses import Teacher, head_losses
from vllm_medusa.training.rows import IGNORED, Texts

H, V, K = 16, 40, 3


def make_heads(kind: str) -> MedusaHeads:
    torch.manual_seed(3)
    token_map = torch.randperm(V)[:25] if "map" in kind else None
    stored = {"own": K, "single": 1}.get(kind.split("+")[0], 0)
    more = {"num_lm_heads": stored, "lm_head_bias": bool(stored), "token_map": token_map}
    heads = MedusaHeads(K, 2, H, V, **more)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.4)
    return heads


def naive(
    heads,
    hidden,
    tokens,  # int64 [N, K] the actual tokens
    weights,
    lm_head,  # over the whole vocabulary
    temperatures,
):
    """One position, head and label at a time."""
    allowed = torch.arange(V) if heads.token_map is None else heads.token_map
    x, sums = heads(hidden), [torch.zeros(()) for _ in range(K)]
    for n, h in itertools.product(range(len(hidden)), range(K)):
        token = int(tokens[n, h])
        if token == IGNORED:
            continue
        if heads.lm_head_weight is None:
            logits = lm_head(x[n, h])[allowed]
        else:
            m = h if len(heads.lm_head_weight) > 1 else 0
            logits = heads.lm_head_weight[m] @ x[n, h] + heads.lm_head_bias[m]
        logs = logits.log_softmax(-1)
        if temperatures is None or temperatures[n] == 0:
            at = (allowed == token).nonzero().flatten()
            sums[h] = sums[h] - logs[at].sum()
        else:
            row = n + h + 1
            full = lm_head(hidden[row].detach()) / temperatures[row]
            sums[h] = sums[h] - (full.softmax(-1)[allowed] * logs).sum()  # without renormalization
    total = torch.stack(sums)
    return (total * weights).sum(), total


@pytest.mark.parametrize("soft", [False, True], ids=["tokens", "soft"])
@pytest.mark.parametrize("kind", ["shared", "own", "single", "shared+map", "own+map"])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_losses_and_gradients_equal_plain_torch(kind, soft, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    heads, length = make_heads(kind), 23
    matrix, bias = torch.randn(V, H), torch.randn(V)
    ids = tuple(torch.randint(V, (length,)).tolist())
    texts = Texts([Record(0, 1, "a", ids, ((2, 9), (12, 23)))])
    tokens = texts.labels(torch.arange(length), K)
    weights = losses.head_weights(K) / 10
    sampled_at = torch.where(torch.arange(length) < 11, 0.7, 0.0) if soft else None

    def whole(x):
        return x @ matrix.T + bias

    def drafted(x):
        return whole(x) if heads.token_map is None else whole(x)[..., heads.token_map]

    results = []
    for ours in (True, False):
        heads.zero_grad(set_to_none=True)
        hidden = torch.randn(length, H, generator=torch.Generator().manual_seed(4))
        hidden.requires_grad_()
        if ours:
            teacher = Teacher(hidden, whole, sampled_at, heads.token_map) if soft else None
            states = heads(hidden)
            loss, sums = head_losses(heads, states, tokens, weights, drafted, teacher=teacher)
        else:
            loss, sums = naive(heads, hidden, tokens, weights, whole, sampled_at)
        (2.5 * loss).backward()
        grads = [hidden.grad, *(p.grad for p in heads.parameters())]
        results.append((loss.detach(), sums.detach(), grads))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    assert all(bool(g.abs().sum() > 0) for g in results[0][2])


@pytest.mark.parametrize("generated", [None, 40], ids=["all rows", "one row"])
def test_logits_are_computed_in_chunks_and_not_for_prompts(generated, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 16)
    seen = []

    def lm_head(x):
        seen.append(len(x))
        return torch.nn.functional.linear(x, torch.ones(V, H))

    labels = torch.zeros(200, K, dtype=torch.int64)
    if generated is not None:
        labels.fill_(IGNORED)[generated, 0] = 3
    states, heads = torch.randn(200, H), make_heads("shared")
    head_losses(heads, heads(states), labels, torch.ones(K), lm_head)
    assert max(seen) == 16 and sum(seen) == (200 if generated is None else 16) * K


WIDTH = kernels.FUSED_WIDTH


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, WIDTH, generator=generator).mul(4).bfloat16()
    temperature = torch.rand(rows, 1, generator=generator) + 0.2
    return logits, temperature


def test_compiled_rows_equal_plain_torch():
    as_written = []

    @kernels.fused
    def counted(logits, soft):
        if not torch.compiler.is_compiling():
            as_written.append(len(logits))
        return losses._cross_entropy.__wrapped__(logits, soft)

    for rows in (24, 24, 7, 1):
        logits, temperature = inputs(rows)
        plain = losses._log_sum.__wrapped__(logits, temperature)
        torch.testing.assert_close(losses._log_sum(logits, temperature), plain)
        soft = losses._probabilities.__wrapped__(logits, temperature, plain)
        torch.testing.assert_close(losses._probabilities(logits, temperature, plain), soft)
        wanted = losses._cross_entropy.__wrapped__(logits, soft)
        torch.testing.assert_close(counted(logits, soft), wanted, rtol=1e-2, atol=1e-6)
    assert not as_written
    assert counted(logits[:, :64], soft[:, :64]) and as_written == [1]  # narrow rows


def test_impossible_tokens_and_rows_without_a_label():
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [torch.nan] * 3])
    soft = torch.tensor([[0.3, 0.0, 0.5], [0.0] * 3])
    entropy, _ = losses._cross_entropy(logits, soft)
    expected = -(soft[0, [0, 2]] * logits[0, [0, 2]].log_softmax(-1)).sum()
    torch.testing.assert_close(entropy[:, 0], torch.stack([expected, expected * 0]))


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_runs_as_written_where_compiling_fails(compiler):
    seen = []

    @kernels.fused
    def doubled(rows):
        if not torch.compiler.is_compiling():
            seen.append(len(rows))
        return rows * 2

    changes = {"cpp.cxx": (compiler,), "force_disable_caches": True}
    with torch._inductor.config.patch(changes), pytest.warns(UserWarning, match="times slower"):
        assert doubled(torch.ones(3, WIDTH)).eq(2).all()
    assert doubled(torch.ones(5, WIDTH)).eq(2).all()
    assert seen == [3, 5]
