"""The loss of Medusa-2: the target's own beside the heads', through one pass of the backbone.

    L = L_LM + lambda_0 * sum over k of lambda_k * cross-entropy of head k

(Medusa, https://arxiv.org/abs/2401.10774, section 2.2.2.) On text that the target wrote, L_LM is
KL(original || trained) at every generated token, the original being the same model with its adapter
off (section 2.3.2); on other text it is the cross-entropy of the next token.

All means are over the tokens of a whole step. A step may come in several parts (micro-batches):
each is divided by the step's counts, so that the parts' gradients add up to the step's. Logits of
some positions exist at a time, [C, V]; their gradients are taken at once, as in `losses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.records import Record
from vllm_medusa.training.batches import pad
from vllm_medusa.training.lora import original
from vllm_medusa.training.losses import (
    CHUNK,
    IGNORED,
    LMHead,
    head_labels,
    head_losses,
    label_mask,
    lm_mask,
)
from vllm_medusa.training.quality import kl_rows
from vllm_medusa.training.target import Target

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class JointBatch:
    """Texts of one pass, padded on the right, and what is asked at each of their N positions.

    The positions of all texts lie one behind the other, without padding.
    """

    ids: Tensor  # int64 [B, L]
    attention_mask: Tensor  # int64 [B, L], 1 where there is text
    following: Tensor  # int64 [N], the next token where it was generated, else IGNORED
    labels: Tensor  # int64 [N, K], the heads' labels
    temperatures: Tensor | None  # fp32 [N], of soft labels; None: the labels are the tokens

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        num_heads: int,
        *,
        soft: bool = False,  # soft labels; those of text nobody sampled are of temperature 1
        token_map: Tensor | None = None,  # int64 [V_draft] on the CPU
        device: torch.device | str = "cpu",
    ) -> JointBatch:
        """Lay out texts.

        A token outside ``token_map`` is no label, so that `counts` are of what has a loss; a soft
        label always has one.
        """
        ids, there = pad([record.token_ids for record in records])
        following, labels, temperatures = [], [], []
        for row, record in enumerate(records):
            size = len(record.token_ids)
            text = ids[row, :size]
            counted = lm_mask(record.generated, size)
            following.append(text.roll(-1).masked_fill(~counted, IGNORED))
            mask = label_mask(record.generated, size, num_heads)
            own = head_labels(text, mask)
            if token_map is not None and not soft:
                own = own.masked_fill(~torch.isin(own, token_map), IGNORED)
            labels.append(own)
            if soft:
                temperatures.append(
                    torch.full((size,), 1.0 if record.temperature is None else record.temperature)
                )
        return cls(
            ids.to(device),
            there.to(device),
            torch.cat(following).to(device),
            torch.cat(labels).to(device),
            torch.cat(temperatures).to(device) if soft else None,
        )

    @property
    def counts(self) -> tuple[int, Tensor]:
        """How many next tokens count, and how many labels of each head, int64 [K]."""
        return int((self.following != IGNORED).sum()), (self.labels != IGNORED).sum(0)


@dataclass(frozen=True)
class JointLosses:
    """What one pass found: ``loss`` carries the gradient, the sums (in nats) are detached."""

    loss: Tensor  # fp32 scalar
    lm_sum: Tensor  # fp32 scalar
    head_sums: Tensor  # fp32 [K]


def joint_losses(
    target: Target,  # holds the model that ``adapted`` wraps
    adapted: PeftModel,
    heads: MedusaHeads,
    draft_head: LMHead,  # the target's over the heads' draft vocabulary
    batch: JointBatch,
    *,
    lm_weight: float,  # of the sum: 1 / the step's next tokens
    head_weights: Tensor,  # [K], of the sums: lambda_0 lambda_k / the step's labels
    distill: bool = True,  # KL against the original model; else cross-entropy of the next token
    chunk: int = CHUNK,  # positions whose logits exist at a time
) -> JointLosses:
    """One pass of the backbone (two with a teacher), and both losses on its states."""
    there = batch.attention_mask.bool()
    teacher = None
    if distill or batch.temperatures is not None:
        with original(adapted):
            teacher = target.hidden_states(batch.ids, batch.attention_mask)[there]  # [N, H]
    states = target.hidden_states(batch.ids, batch.attention_mask)[there]  # [N, H]
    lm_sum = lm_loss(
        states, batch.following, target.lm_head, teacher if distill else None, chunk=chunk
    )
    medusa = head_losses(  # the heads are fp32, and compute so unless autocast is on
        heads,
        states.float(),
        batch.labels,
        head_weights,
        draft_head,
        temperatures=batch.temperatures,
        teacher_states=None if teacher is None else teacher.float(),
        teacher_lm_head=target.lm_head,
        chunk=chunk,
    )
    loss = lm_weight * lm_sum + medusa.loss
    return JointLosses(loss, lm_sum.detach(), medusa.sums)


def lm_loss(
    states: Tensor,  # [N, H]
    following: Tensor,  # int64 [N], IGNORED where none
    lm_head: LMHead,
    teacher: Tensor | None = None,  # [N, H]
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Sum over the counted positions of KL(teacher || student), or of the cross-entropy.

    Returns an fp32 scalar, whose gradient reaches ``states`` only: neither the LM head nor the
    teacher is trained. It is exactly 0 where student and teacher are equal.
    """
    return _ChunkedLM.apply(states, following, lm_head, teacher, chunk)


class _ChunkedLM(torch.autograd.Function):
    """Loss and gradient in one go: what flows back is only the loss's scalar factor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        following: Tensor,
        lm_head: LMHead,
        teacher: Tensor | None,
        chunk: int,
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        grad = torch.zeros(states.shape, device=states.device) if states.requires_grad else None
        (counted,) = (following != IGNORED).nonzero(as_tuple=True)
        for at in counted.split(chunk):
            leaf = states[at].detach().requires_grad_(grad is not None)
            with torch.enable_grad():
                logits = lm_head(leaf).float()  # [C, V]
                if teacher is None:
                    loss = F.cross_entropy(logits, following[at], reduction="sum")
                else:
                    with torch.no_grad():
                        wanted = lm_head(teacher[at]).float()
                    loss = kl_rows(wanted, logits).sum()
            total += loss.detach()
            if grad is not None:
                grad[at] = torch.autograd.grad(loss, leaf)[0].float()
        ctx.save_for_backward(None if grad is None else grad.to(states.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (None if grad is None else grad * upstream[0].to(grad.dtype), *[None] * 4)
