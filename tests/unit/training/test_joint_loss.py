"""The loss of Medusa-2 and its gradients against the formula in plain torch; negative controls.

The models are random with large weights, so that student, teacher and labels all differ.
"""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.models import HIDDEN, VOCAB, save_model
from torch import Tensor

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.records import Record
from vllm_medusa.training import lora, losses, medusa2
from vllm_medusa.training.losses import head_weights
from vllm_medusa.training.medusa2 import Medusa2
from vllm_medusa.training.method import Batch, Data
from vllm_medusa.training.options import JointOptions, StepOptions
from vllm_medusa.training.rows import WHOLE, Texts
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers

K = 3
LAMBDA_0 = 0.2  # weight of the heads' losses


def record(index: int, length: int, *spans: tuple[int, int]) -> Record:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, VOCAB, (length,), generator=generator)
    return Record(index, index + 1, str(index), tuple(ids.tolist()), spans, 0.7 + 0.2 * index)


RECORDS = [record(0, 19, (6, 19)), record(1, 12, (1, 4), (5, 12)), record(2, 9, (8, 9))]


class Joint:
    """A target with an adapter and heads, as if partly trained."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        path = save_model(folder, "Llama", initializer_range=0.1)
        self.target = Target.load(path, dtype=dtype)
        self.adapted = lora.attach(self.target.model, JointOptions(lora_rank=4), seed=0)
        self.heads = MedusaHeads(K, 1, HIDDEN, VOCAB, num_lm_heads=0)
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in (*self.adapter.values(), *self.heads.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.05)

    @property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        return lora.adapter_parameters(self.adapted)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        trained = self.adapter | dict(self.heads.named_parameters())
        found = torch.autograd.grad(loss, list(trained.values()))
        return dict(zip(trained, found, strict=True))

    def plain(self, soft: bool, distill: bool) -> Tensor:
        """The formula, text by text, with whole logits."""
        lm = []
        per_head = [[] for _ in range(K)]
        for text in RECORDS:
            ids = torch.tensor([text.token_ids])
            student = self.target.model(ids, output_hidden_states=True)
            with self.adapted.disable_adapter(), torch.no_grad():
                teacher = self.target.model(ids).logits[0]
            head_logits = self.target.lm_head(self.heads(student.hidden_states[-1][0]))  # [T, K, V]
            for start, end in text.generated:
                for t in range(max(0, start - 1), end - 1):
                    p, log_q = teacher[t].softmax(0), student.logits[0, t].log_softmax(0)
                    lm.append((p * (p.log() - log_q)).sum() if distill else -log_q[ids[0, t + 1]])
                    for head in range(K):
                        label = t + head + 2
                        if label >= end:
                            continue
                        wanted = F.one_hot(ids[0, label], VOCAB).float()
                        if soft:
                            wanted = (teacher[label - 1] / text.temperature).softmax(0)
                        log = head_logits[t, head].log_softmax(0)
                        per_head[head].append(-(wanted * log).sum())
        medusa = [
            weight * torch.stack(losses).mean()
            for weight, losses in zip(head_weights(K), per_head, strict=True)
        ]
        return torch.stack(lm).mean() + LAMBDA_0 * torch.stack(medusa).sum()

    def method(self, soft: bool = False, distill: bool = True) -> Medusa2:
        joint = JointOptions(lm_loss="kl" if distill else "cross-entropy")
        settings = StepOptions(labels="soft" if soft else "tokens")
        texts = Texts(RECORDS)
        data = Data(texts, texts.cut(WHOLE, whole=True))
        setup = data, data, settings, Workers("cpu")
        return Medusa2(self.target, self.adapted, self.heads, joint, *setup)

    def batch(self, soft: bool = False) -> Batch:
        method = self.method(soft)
        return method.collate(method.data.pieces)

    def ours(self, soft: bool, distill: bool, parts: int) -> Tensor:
        method = self.method(soft, distill)
        batches = [method.collate(method.data.pieces[i::parts]) for i in reversed(range(parts))]
        counts = sum(batch.counts for batch in batches)
        weights = torch.cat([torch.ones(1), LAMBDA_0 * head_weights(K)]) / counts
        return torch.stack([method.loss(batch, weights)[0] for batch in batches]).sum()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Joint(tmp_path_factory.mktemp("joint"))


def compare(joint: Joint, soft: bool = False, distill: bool = True, parts: int = 1) -> None:
    expected, loss = joint.plain(soft, distill), joint.ours(soft, distill, parts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted, found = joint.gradients(expected), joint.gradients(loss)
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert scale > 0, f"{name}: nothing to compare"
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * scale, rtol=1e-3, msg=name)


@pytest.mark.parametrize("distill", [True, False], ids=["kl", "cross-entropy"])
@pytest.mark.parametrize("soft", [False, True], ids=["tokens", "soft"])
def test_loss_and_gradients_equal_the_formula(llama, soft, distill):
    compare(llama, soft, distill)


@pytest.mark.parametrize(("parts", "chunk"), [(1, 5), (2, 3), (3, 1000)])
def test_parts_and_chunks_sum_to_the_step(llama, parts, chunk, monkeypatch):
    for module in (medusa2, losses):
        monkeypatch.setattr(module, "CHUNK", chunk)
    compare(llama, parts=parts)


def test_control_wrong_teachers_are_detected(llama, monkeypatch):
    """Negative controls: the comparison above fails if the teacher is not the original model."""

    @contextlib.contextmanager
    def left_on(_):
        with torch.no_grad():
            yield

    right = medusa2.kl_rows
    with monkeypatch.context() as patch:
        patch.setattr(lora, "original", left_on)
        with pytest.raises(AssertionError):
            compare(llama)
    with monkeypatch.context() as patch:
        patch.setattr(medusa2, "kl_rows", lambda teacher, student: right(student, teacher))
        with pytest.raises(AssertionError):
            compare(llama)
    compare(llama)


@pytest.mark.parametrize("soft", [False, True], ids=["tokens", "soft"])
def test_a_half_precision_target_and_fp32_heads_without_autocast(soft, llama, tmp_path):
    half = Joint(tmp_path, torch.bfloat16)
    half.heads.load_state_dict(llama.heads.state_dict())
    found = []
    for joint in (llama, half):
        method = joint.method(soft)
        loss, sums = method.loss(joint.batch(soft), torch.ones(1 + K))
        gradients = joint.gradients(loss).values()
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert any(bool(g.any()) for g in gradients)
        found.append(sums[1:])
    # bf16 keeps 8 bits
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.0)
