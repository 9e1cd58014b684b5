"""The heads' losses, without storing the logits of a whole batch.

Head h (0-based) at position t predicts token t + h + 2 (Medusa, https://arxiv.org/abs/2401.10774,
section 2.2.1). With K heads over a vocabulary of V tokens the logits of T positions are
[T, K, V] numbers: 20 GB in fp32 for 8192 positions, 5 heads and V = 128k. So loss and gradient are
computed together, for some positions and one head at a time, while their logits exist; only the
gradients of the heads' states, [T, K, H], and of stored LM heads are kept.

Labels are the tokens that follow, or, if "soft", the target's whole distribution over each of them
at the sampling temperature of the text: the same expected loss with less noise. Positions
in a batch are consecutive, so the distribution over head h's label at row n is the target's
output for the state in row n + h + 1.

With a draft vocabulary D, labels outside it have no loss. For a soft label, p over all V tokens,
the loss is -sum of p(v) log q(v) over v in D. p is not rescaled to sum to 1 over D, so a position
where D holds little of p has little weight. This needs the target's whole LM head once per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.kernels import fused
from vllm_medusa.training.rows import IGNORED

CHUNK = 256  # positions whose logits exist at a time: 4 * CHUNK * V floats, twice that if soft

LMHead = Callable[[Tensor], Tensor]  # [N, H] -> logits [N, V or V_draft]
AnyHeads = MedusaHeads | EagleDrafter  # a drafter's steps correspond to K heads


def head_weights(num_heads: int, decay: float = 0.8) -> Tensor:
    """lambda_k = decay^k of the paper, k counted from 1: fp32 [K]."""
    return decay ** torch.arange(1, num_heads + 1, dtype=torch.float32)


def draft_labels(labels: Tensor, heads: AnyHeads, outside: int) -> Tensor:
    """Map target ids to draft ids, any shape; tokens without one become ``outside``.

    Labels below 0, which are not tokens, are unchanged.
    """
    if heads.token_map is None:
        return labels
    draft_id = labels.new_full((heads.vocab_size,), outside)
    draft_id[heads.token_map] = torch.arange(len(heads.token_map), device=labels.device)
    return torch.where(labels < 0, labels, draft_id[labels.clamp_min(0)])


def head_losses(
    heads: AnyHeads,
    x: Tensor,  # [N, K, H], the heads' outputs
    labels: Tensor,  # int64 [N, K] target ids, IGNORED if none
    weights: Tensor,  # [K], the factor of each head's sum
    lm_head: LMHead | None = None,  # over the draft vocabulary, for heads that store none
    *,
    teacher: Teacher | None = None,  # for soft labels
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the heads' cross-entropies, with its gradient, and each head's own.

    Returns an fp32 scalar and fp32 [K], each head's sum over its labels in nats, detached. Divide
    ``weights`` by the number of labels for means. Gradients reach ``x`` and stored LM heads, but
    not the ``lm_head``.

    With a ``teacher`` the labels are soft: head h at row n learns the distribution of the teacher's
    row n + h + 1, which must be the state h + 1 positions later if (n, h) has a label.
    With a token map, labels outside the draft vocabulary do not count, nor does the probability of
    soft labels there.
    """
    drafts = draft_labels(labels, heads, IGNORED)
    valid = (drafts if teacher is None else labels) != IGNORED
    weight, bias = heads.lm_head_weight, heads.lm_head_bias
    parts = (x, weight, bias, drafts, valid, weights.float(), lm_head, teacher)
    return _ChunkedLosses.apply(*parts)  # type: ignore[no-any-return,no-untyped-call]


class Teacher:
    """The target's distribution over labels; over the draft vocabulary, if there is one."""

    def __init__(
        self,
        states: Tensor,  # [N, H], inputs of the target's LM head
        lm_head: LMHead,  # over the whole vocabulary
        temperatures: Tensor,  # fp32 [N]; 0: the token itself
        token_map: Tensor | None,
    ) -> None:
        self.states, self.lm_head, self.temperatures = states.detach(), lm_head, temperatures
        self.token_map = token_map
        self.greedy = temperatures == 0  # [N]
        self.any_greedy = bool(self.greedy.any())

    @torch.no_grad()
    def after(self, start: int, stop: int, num_heads: int) -> Tensor:
        """Distributions over the tokens after rows start + 1, start + 2, ...

        Returns fp32 [stop - start + num_heads - 1, V_draft].
        """
        rows = slice(start + 1, stop + num_heads)
        logits = self.lm_head(self.states[rows])
        temperature = self.temperatures[rows, None].clamp(min=1e-4)  # 0: see `labels_of`
        # Tokens outside the draft vocabulary count in the sum, although heads can't draft them.
        total = _log_sum(logits, temperature)
        drafts = logits if self.token_map is None else logits[:, self.token_map]
        soft = _probabilities(drafts, temperature, total)
        lacking = stop - start + num_heads - 1 - len(soft)  # at the end, without labels
        return F.pad(soft, (0, 0, 0, lacking)) if lacking else soft

    def labels_of(self, soft: Tensor, rows: slice, label: Tensor) -> Tensor:
        """Replace the distribution by the token itself where the text was decoded greedily."""
        if not self.any_greedy:
            return soft
        return torch.where(self.greedy[rows, None], _one_hot(label, soft.shape[-1]), soft)


class _ChunkedLosses(torch.autograd.Function):
    """Computes loss and gradients together; backward only scales the stored gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,  # [N, K, H]
        weight: Tensor | None,  # [M, V_draft, H]
        bias: Tensor | None,  # [M, V_draft]
        labels: Tensor,  # int64 [N, K] draft ids
        valid: Tensor,  # bool [N, K]
        weights: Tensor,  # fp32 [K]
        lm_head: LMHead | None,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor]:
        count = x.shape[1]
        sums = torch.zeros(count, device=x.device)
        grads: list[Any] = [
            torch.zeros(t.shape, device=t.device) if t is not None and t.requires_grad else None
            for t in (x, weight, bias)
        ]
        wanted = [i for i, grad in enumerate(grads) if grad is not None]
        on_cpu = x.device.type == "cpu"
        for start in range(0, len(x), CHUNK):
            rows = slice(start, min(start + CHUNK, len(x)))
            if on_cpu and not bool(valid[rows].any()):
                continue  # skip prompts; on a device this check would sync
            after = None if teacher is None else teacher.after(rows.start, rows.stop, count)
            for head in range(count):
                label, counts = labels[rows, head], valid[rows, head, None]
                slot = head if weight is not None and len(weight) > 1 else 0
                places: list[Any] = [(rows, head), slot, slot]
                leaves: list[Any] = [
                    None if t is None else t[place].detach().requires_grad_(grad is not None)
                    for t, place, grad in zip((x, weight, bias), places, grads, strict=True)
                ]
                with torch.enable_grad():
                    if weight is None and lm_head is not None:
                        logits = lm_head(leaves[0])
                    else:
                        logits = F.linear(*leaves)
                if teacher is None or after is None:
                    soft = _one_hot(label, logits.shape[-1])
                else:
                    soft = teacher.labels_of(after[head : head + len(label)], rows, label)
                entropy, gradient_of_logits = _cross_entropy(logits.detach(), soft * counts)
                sums[head] += entropy.sum()
                if not wanted:
                    continue
                inputs = [leaves[i] for i in wanted]
                found = torch.autograd.grad(logits, inputs, gradient_of_logits)
                for i, gradient in zip(wanted, found, strict=True):
                    grads[i][places[i]] += gradient.float() * weights[head]
        ctx.save_for_backward(*(None if g is None else g.to(x.dtype) for g in grads))
        ctx.mark_non_differentiable(sums)
        return (sums * weights).sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        factor = upstream[0]
        scaled = [None if g is None else g * factor.to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)


def _one_hot(label: Tensor, size: int) -> Tensor:
    """Label int64 [n], `IGNORED` if none -> fp32 [n, size]."""
    hot = torch.zeros(len(label), size, device=label.device)
    sure = (label != IGNORED).to(hot)[:, None]
    return hot.scatter_(1, label.clamp(min=0)[:, None], sure)


# One pass over a row of logits instead of up to ten: `fused` compiles these for large vocabularies.


@fused
def _log_sum(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [n, V] of any float dtype, fp32 [n, 1] -> fp32 [n, 1]."""
    return (logits.float() / temperature).logsumexp(-1, keepdim=True)


@fused
def _probabilities(logits: Tensor, temperature: Tensor, total: Tensor) -> Tensor:
    """Logits [n, V], fp32 [n, 1] twice -> fp32 [n, V]."""
    return (logits.float() / temperature - total).exp()


@fused
def _cross_entropy(logits: Tensor, soft: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, V], labels fp32 [n, V] -> losses fp32 [n, 1], gradient [n, V] in logits' dtype.

    A row of labels may sum to less than 1 with a token map, and sums to 0 if it does not count.
    Logits may be -inf where the label is 0.
    """
    values, mass = logits.float(), soft.sum(-1, keepdim=True)
    total = values.logsumexp(-1, keepdim=True)
    found = torch.where(soft > 0, soft * values, 0.0).sum(-1, keepdim=True)
    entropy = torch.where(mass > 0, mass * total - found, 0.0)
    return entropy, (mass * (values - total).exp() - soft).to(logits.dtype)
