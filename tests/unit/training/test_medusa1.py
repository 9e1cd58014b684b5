"""Heads learn, nothing else changes, and an interrupted run ends with the same weights."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import save_model

from vllm_medusa.decode import decode
from vllm_medusa.offline.records import Record
from vllm_medusa.training import method as methods
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.loop import Loop, NotFiniteError
from vllm_medusa.training.medusa1 import PIECE_ROWS, Medusa1, new_heads
from vllm_medusa.training.method import Data
from vllm_medusa.training.options import HeadOptions, StepOptions
from vllm_medusa.training.rows import Texts
from vllm_medusa.training.run import Stage, TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers
from vllm_medusa.tree import TokenTree

PROMPT = [5, 9, 30, 77]
K = 3
OVERFIT = StepOptions(
    labels="tokens",
    epochs=400,
    batch_tokens=48,
    learning_rate=2e-2,
    warmup_steps=10,
    measure_every=10_000,
)
SHORT = replace(OVERFIT, epochs=6, batch_tokens=40, measure_every=5)


@torch.no_grad()
def greedy_record(target: Target, count: int = 48, index: int = 0) -> Record:
    """The target's continuation of `PROMPT` at temperature 0."""
    ids = list(PROMPT)
    ids[0] += index
    for _ in range(count):
        states = target.hidden_states(torch.tensor([ids]))
        ids.append(int(target.lm_head(states[0, -1]).argmax()))
    return Record(index, index + 1, str(index), tuple(ids), ((len(PROMPT), len(ids)),), 0.0)


def cut(target: Target, records: list[Record], size: int, max_bytes: int = 1 << 30) -> Data:
    """Pieces of texts with states in memory."""
    texts = Texts(records)
    pieces = texts.cut(size)
    states = HiddenStates(target, texts, pieces, dtype=torch.float32, max_bytes=max_bytes)
    states.build()
    return Data(texts, pieces, states)


def looped(
    target: Target,
    records: list[Record],
    run: TrainingRun,
    settings: StepOptions = OVERFIT,
    *,
    heads: Any = None,
    cached: bool = True,
) -> Loop:
    """A training loop with cached states, evaluated on its own training text."""
    run.work.mkdir(exist_ok=True)
    size = min(PIECE_ROWS, settings.batch_tokens or PIECE_ROWS)
    train = cut(target, records, size, 1 << 30 if cached else 0)
    heads = heads or new_heads(target, HeadOptions(kind="medusa", num_heads=K))
    setup = train, cut(target, records, 32), settings, Workers("cpu")
    return Loop(Medusa1(target, heads, *setup), Stage(run))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return Target.load(save_model(folder, "Llama", tie_word_embeddings=True))


@pytest.fixture(scope="module")
def records(target):
    return [greedy_record(target, 40, index) for index in range(3)]


def seen_tokens(records: list) -> torch.Tensor:
    """A small draft vocabulary."""
    return torch.tensor(sorted({t for record in records for t in record.token_ids[4:20]}))


@pytest.fixture
def trained(target, records, tmp_path):
    """Train; the loop and the losses of all steps."""

    def run(name="run", like=None, heads=None, cached=True, bf16=False):
        with TrainingRun(tmp_path / name, {}) as run:
            made = looped(target, records, run, SHORT, heads=heads, cached=cached)
            made.method.bf16 = bf16
            if like is not None:  # the same order of pieces, for comparison
                made.plan = like.plan
            made.train()
            return made, [line["loss"] for line in made.stage.entries() if "loss" in line]

    return run


def weights(made: Loop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.method.heads.state_dict().items()}


def test_heads_memorize_a_text_and_every_step_accepts_all(target, tmp_path):
    before = copy.deepcopy(target.model.state_dict())
    record = greedy_record(target)
    with TrainingRun(tmp_path / "heads", {}) as run:
        made = looped(target, [record], run)
        made.train()
    assert [top[0] for top in made.method.measure()["heldout"]["top"]] == [1.0] * K

    # only the heads were trained: the backbone is bitwise unchanged
    assert all(torch.equal(before[name], t) for name, t in target.model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
    stepped = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert stepped == {id(p) for p in made.method.heads.parameters()}
    assert {id(p) for p in made.optimizer.state} == stepped
    assert stepped.isdisjoint({id(p) for p in target.model.parameters()})

    # and the chain of all heads is always accepted: tau is 1 + K
    tokens = len(record.token_ids) - len(PROMPT)
    out = decode(
        target.model, made.method.heads, TokenTree.chain(K), torch.tensor(PROMPT), tokens - K
    )
    assert out.token_ids == list(record.token_ids[len(PROMPT) : -K])
    assert set(out.accepted_per_step) == {K}


@pytest.mark.parametrize(("labels", "kind"), [("tokens", "medusa"), ("soft", "hydra")])
def test_an_interrupted_run_ends_with_the_same_weights(labels, kind, target, records, tmp_path):
    warm = [replace(record, temperature=0.7) for record in records]
    settings = replace(SHORT, labels=labels)

    def heads():
        some = seen_tokens(warm)[::2] if kind == "hydra" else None  # other tokens have no label
        return new_heads(target, HeadOptions(kind=kind, num_heads=K, num_layers=2), some)

    with TrainingRun(tmp_path / "whole", {}) as run:
        whole = looped(target, warm, run, settings, heads=heads())
        whole.train()
        wanted, log = weights(whole), list(whole.stage.entries())
    assert [line["step"] for line in log if "losses" in line] == list(range(1, whole.steps + 1))
    assert [line["step"] for line in log if "heldout" in line] == [5, 10, 15]
    losses = [line["loss"] for line in log if "losses" in line]
    assert losses[-1] < 0.9 * losses[0]

    def stop(cut):
        def report(step, *_):
            if step == cut:
                raise KeyboardInterrupt

        return report

    for cut in (3, 3, 8, 8):  # before any checkpoint was written, and between two
        with TrainingRun(tmp_path / "cut", {}) as run, pytest.raises(KeyboardInterrupt):
            looped(target, warm, run, settings, heads=heads()).train(stop(cut))
    with TrainingRun(tmp_path / "cut", {}) as run:
        made = looped(target, warm, run, settings, heads=heads())
        made.train()
        found = weights(made)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert list(made.stage.entries()) == log


def test_passes_and_uncached_states_change_nothing(trained, monkeypatch):
    made, losses = trained()
    assert trained("computed", cached=False, like=made)[1] == pytest.approx(losses, rel=1e-4)
    monkeypatch.setattr(methods.Method, "pass_rows", 32)
    assert trained("passes")[1] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("architecture", ["Phi", "Granite"])  # a bias, a scale
@pytest.mark.parametrize("lm_heads", ["shared", "own"])
def test_untrained_heads_give_the_targets_own_logits(lm_heads, architecture, tmp_path):
    options = {"tune": lambda m: m.lm_head.bias.normal_()}
    if architecture == "Granite":
        options = {"logits_scaling": 8.0}
    target = Target.load(save_model(tmp_path, architecture, head_dim=None, **options))
    token_map = torch.tensor([4, 9, 300])
    for rows in (None, token_map):
        shape = {"num_heads": 2, "num_layers": 2, "lm_heads": lm_heads}
        heads = new_heads(target, HeadOptions(kind="medusa", **shape), rows)
        states = torch.randn(5, 64)
        wanted = target.lm_head(states)
        wanted = wanted if rows is None else wanted[:, rows]
        logits = heads.compute_logits(heads(states), target.lm_head)
        torch.testing.assert_close(logits, wanted[:, None].expand(-1, 2, -1), rtol=1e-4, atol=1e-4)


def test_own_lm_heads_and_a_small_vocabulary_train_too(target, records, trained):
    options = HeadOptions(kind="medusa", num_heads=K, lm_heads="own")
    heads = new_heads(target, options, seen_tokens(records))
    first = heads.lm_head_weight.detach().clone()
    made, losses = trained(heads=heads)
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(heads.lm_head_weight, first)
    # tokens outside the draft vocabulary are missed
    assert made.method.measure()["heldout"]["top"][0][-1] < 1


def test_soft_labels_of_a_small_vocabulary_use_the_full_one(target, records, tmp_path):
    seen = seen_tokens(records)
    warm = [replace(record, temperature=0.7) for record in records]
    heads = new_heads(target, HeadOptions(kind="medusa", num_heads=K), seen)
    with TrainingRun(tmp_path / "soft", {}) as run:
        method = looped(target, warm, run, replace(SHORT, labels="soft"), heads=heads).method
    first = [p for p in method.data.pieces if p.start < len(warm[0].token_ids)]
    _, found = method.loss(method.collate(first), method.decay)
    ids = torch.tensor([records[0].token_ids])
    with torch.no_grad():
        logits = target.lm_head(target.hidden_states(ids)[0])  # untrained heads output the same
    start, end = records[0].generated[0]
    for head in range(K):
        wanted = 0.0
        for t in range(start - 1, end - head - 2):
            teacher = (logits[t + head + 1] / 0.7).softmax(-1)[seen]
            wanted -= float((teacher * logits[t][seen].log_softmax(-1)).sum())
        assert float(found[head]) == pytest.approx(wanted, rel=1e-3)


def test_a_non_finite_loss_stops_and_names_its_line(target, records, tmp_path):
    with TrainingRun(tmp_path / "bad", {}) as run:
        settings = replace(SHORT, batch_tokens=3 * 39, epochs=12)
        made = looped(target, records, run, settings)
        states, texts = made.method.data.states, made.method.data.texts
        read = states.read

        def corrupted(wanted):
            found, at = read(wanted), 0
            for start, stop in wanted:
                if texts.record_of(start) == 1 and made.step >= 7:
                    found[at] = float("nan")
                at += stop - start
            return found

        states.read = corrupted
        with pytest.raises(NotFiniteError, match=r"step 8 of .* is not finite: 2\."):
            made.train()
        state = made.stage.load()
    assert state is not None and state["step"] == 7
    assert all(bool(t.isfinite().all()) for t in state["heads"].values())


def test_bfloat16_trains_about_as_well(trained):
    made, losses = trained(bf16=True)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in made.method.heads.parameters()} == {torch.float32}
