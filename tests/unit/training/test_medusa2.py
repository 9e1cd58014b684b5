"""The joint stage on a tiny random model: what is trained, what improves, and killed runs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import HIDDEN, VOCAB, save_model
from torch import Tensor

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.records import Record
from vllm_medusa.training import lora
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.loop import Loop
from vllm_medusa.training.medusa2 import Medusa2
from vllm_medusa.training.method import Data
from vllm_medusa.training.options import JointOptions, StepOptions
from vllm_medusa.training.rows import WHOLE, Texts
from vllm_medusa.training.run import Stage, TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers

K = 2
JOINT = JointOptions(lora_rank=4, lora_alpha=8, lm_loss="kl", heads_weight=0.2, pass_tokens=40)
STEPS = StepOptions(
    labels="tokens", epochs=2, batch_tokens=60, learning_rate=4e-3, warmup_steps=2, measure_every=4
)


def records(count: int, first: int = 0) -> list[Record]:
    """Texts with few distinct words, so that heads can learn something."""
    found = []
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        size = 14 + index % 9
        ids = torch.randint(3, 9, (size,), generator=generator).tolist()
        found.append(Record(index, 10 * index, str(index), tuple(ids), ((4, size),), 1.0))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("medusa2"), "Llama", initializer_range=0.1)


class Job:
    """One training in a folder; recreated after a kill."""

    def __init__(
        self,
        source: str,
        folder: Path,
        joint: JointOptions = JOINT,
        steps: StepOptions = STEPS,
        token_map: Tensor | None = None,
        bf16: bool = False,
    ):
        self.target = Target.load(source)
        self.own = {n: t.clone() for n, t in self.target.model.state_dict().items()}
        self.run = TrainingRun(folder / "heads", {"steps": dataclasses.asdict(steps)})
        self.run.work.mkdir(exist_ok=True)
        heldout = Texts(records(4, 100))
        spans = heldout.cut(WHOLE)
        states = HiddenStates(self.target, heldout, spans, dtype=torch.float32)
        states.build()
        self.adapted = lora.attach(self.target.model, joint, seed=steps.seed)
        self.heads = MedusaHeads(K, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=token_map)
        train = Texts(records(16))
        data = Data(train, train.cut(WHOLE, whole=True))
        setup = data, Data(heldout, spans, states), steps, Workers("cpu"), bf16
        self.method = Medusa2(self.target, self.adapted, self.heads, joint, *setup)
        self.loop = Loop(self.method, Stage(self.run))
        self.loop.resume()

    def result(self) -> dict[str, Tensor]:
        trained = self.method.adapter | dict(self.heads.named_parameters())
        return {name: parameter.detach().clone() for name, parameter in trained.items()}

    def log(self) -> list[dict[str, Any]]:
        return list(self.loop.stage.entries())


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Trained without interruption."""
    job = Job(source, tmp_path_factory.mktemp("whole"))
    job.loop.train()
    return job


def test_heads_learn_and_the_targets_weights_are_unchanged(whole):
    log = whole.log()
    steps = [entry for entry in log if "lambda_0" in entry]
    measured = [entry for entry in log if "quality" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, whole.loop.steps + 1))
    assert whole.loop.steps >= 8 and measured[0]["step"] == 0
    assert measured[-1]["step"] == whole.loop.steps
    rates = [group["initial_lr"] for group in whole.loop.optimizer.param_groups]
    assert rates == [4e-3, 16e-3], "the heads' rate is higher"
    weights = [entry["lambda_0"] for entry in steps]
    assert weights == sorted(weights) and weights[-1] == pytest.approx(0.2)

    first, last = measured[0], measured[-1]
    assert abs(first["quality"]["kl"]) < 1e-9
    assert sum(last["heldout"]["loss"]) < 0.8 * sum(first["heldout"]["loss"])
    assert 1e-7 < last["quality"]["kl"] < 0.05

    kept = {n.replace(".base_layer.", "."): t for n, t in whole.target.model.state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.own.items())


def test_gradient_checkpointing_gives_the_same_gradients(source, tmp_path):
    results = []
    steps = dataclasses.replace(STEPS, batch_tokens=10_000)
    for number, twice in enumerate((False, True)):
        (tmp_path / str(number)).mkdir()
        joint = dataclasses.replace(JOINT, checkpoint_layers=twice)
        job = Job(source, tmp_path / str(number), joint, steps)
        calls = []
        note = functools.partial(lambda seen, *_: seen.append(1), calls)
        job.target.model.model.layers[0].mlp.register_forward_pre_hook(note)
        job.loop.train()
        results.append((len(calls), job.result()))
    (once, plain), (more, checkpointed) = results
    assert more > once
    for name, tensor in plain.items():
        torch.testing.assert_close(checkpointed[name], tensor, atol=1e-6, rtol=1e-4)


def test_mean_losses_cover_labels_in_the_draft_vocabulary(source, tmp_path):
    """Untrained heads predict the next token: all losses of step 1 follow from the target."""
    drafted = torch.tensor([3, 5, 6])
    steps = dataclasses.replace(STEPS, batch_tokens=10_000, epochs=1)
    job = Job(source, tmp_path, steps=steps, token_map=drafted)
    found = [[] for _ in range(K)]
    for text in records(16):
        ids = torch.tensor([text.token_ids])
        with torch.no_grad():
            states = job.target.hidden_states(ids)[0]
            logs = job.method.lm_head(job.heads(states)).log_softmax(-1)  # [T, K, V_draft]
        ((start, end),) = text.generated
        for t in range(start - 1, end - 1):
            for head in range(K):
                label = t + head + 2
                at = (drafted == text.token_ids[label]).nonzero() if label < end else drafted[:0]
                found[head] += [-float(logs[t, head, place]) for place in at.flatten()]
    job.loop.train()
    (step,) = [entry for entry in job.log() if "lambda_0" in entry]
    assert step["losses"] == pytest.approx([sum(x) / len(x) for x in found], rel=1e-3)


def test_before_and_after_are_measured_equally_in_bfloat16_too(source, tmp_path):
    """Rounding does not count as degradation: a new adapter has exactly none."""
    steps = dataclasses.replace(STEPS, batch_tokens=10_000, epochs=1)
    job = Job(source, tmp_path, steps=steps, bf16=True)
    job.loop.train()
    first = next(entry["quality"] for entry in job.log() if "quality" in entry)
    assert first["kl"] == 0.0
    assert first["perplexity_after"] == first["perplexity_before"]
