"""The heads' losses, without holding the logits of a whole batch.

Head h (0-based) at position t predicts token t + h + 2 (Medusa, https://arxiv.org/abs/2401.10774,
section 2.2.1). With K heads over a vocabulary of V tokens the logits of T positions are
[T, K, V] numbers: 20 GB in fp32 for 8192 positions, 5 heads and V = 128k. So loss and gradient are
computed together, some positions and one head at a time, while the logits of those are there; what
is kept is the gradient of the heads' states, [T, K, H], and of stored LM heads.

Labels are the tokens that follow, or, "soft", the target's whole distribution over each of them at
the temperature that the text was sampled with: the same expected loss with less noise. Positions
are consecutive in a batch, so the distribution over head h's label at row n is what the
target makes of the state in row n + h + 1.

With a draft vocabulary D a label outside it adds no loss. Of a soft label, p over all V tokens,
that leaves -sum of p(v) log q(v) over v in D, with p not renormalized over D: else a position where
D holds little of p would weigh as much as any other. So p needs the target's whole LM head once for
each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.heads.model import MedusaHeads

IGNORED = -100  # a label that doesn't count
CHUNK = 256  # positions whose logits are there at a time

LMHead = Callable[[Tensor], Tensor]  # [N, H] -> logits [N, V or V_draft]
AnyHeads = MedusaHeads | EagleDrafter  # the latter's steps are K heads


def head_labels(
    ids: Tensor,  # int64 [L]
    generated: Sequence[tuple[int, int]],
    num_heads: int,
    *,
    own: bool = False,  # a column before the heads': the target's own next token
) -> Tensor:
    """The token that each head should predict at each position: int64 [L, K or 1 + K].

    The label of head h at t counts if and only if the root t + 1 and the label t + h + 2 lie in the
    same generated span [start, end): what serving asks of the heads. Elsewhere it is `IGNORED`.
    """
    position = torch.arange(len(ids))[:, None]  # [L, 1]
    label = position + torch.arange(-int(own), num_heads) + 2
    counts = torch.zeros(label.shape, dtype=torch.bool)
    for start, end in generated:
        counts |= (position + 1 >= start) & (label < min(end, len(ids)))
    return ids[label.clamp(max=len(ids) - 1)].masked_fill(~counts, IGNORED)


def head_weights(num_heads: int, decay: float = 0.8) -> Tensor:
    """lambda_k = decay^k of the paper, k counted from 1: fp32 [K]."""
    return decay ** torch.arange(1, num_heads + 1, dtype=torch.float32)


def draft_labels(labels: Tensor, heads: AnyHeads, outside: int) -> Tensor:
    """Target ids to draft ids, any shape; ``outside`` for tokens that the draft vocabulary lacks.

    Labels below 0, which are no tokens, stay as they are.
    """
    if heads.token_map is None:
        return labels
    draft_id = labels.new_full((heads.vocab_size,), outside)
    draft_id[heads.token_map] = torch.arange(len(heads.token_map), device=labels.device)
    return torch.where(labels < 0, labels, draft_id[labels.clamp_min(0)])


def head_losses(
    heads: AnyHeads,
    x: Tensor,  # [N, K, H], what the heads make of the target's states
    labels: Tensor,  # int64 [N, K] target ids, IGNORED where none
    weights: Tensor,  # [K], the factor of each head's sum
    lm_head: LMHead | None = None,  # over the draft vocabulary, for heads that store none
    *,
    teacher: Teacher | None = None,  # of soft labels
    chunk: int = CHUNK,  # positions at a time: 4 * chunk * V floats, twice that if soft
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the heads' cross-entropies, with its gradient, and each head's own.

    Returns an fp32 scalar and fp32 [K], each head's sum over its labels in nats, detached. Divide
    ``weights`` by the labels' counts for means. Gradients reach ``x`` and the heads' stored LM
    heads; never the ``lm_head``.

    With a ``teacher`` the labels are soft: wherever (n, h) has a label, the teacher's row n + h + 1
    has to be the state h + 1 positions on. With a token map, labels outside the draft vocabulary
    don't count, nor does the mass of soft labels there.
    """
    drafts = draft_labels(labels, heads, IGNORED)
    valid = (drafts if teacher is None else labels) != IGNORED
    weight, bias = heads.lm_head_weight, heads.lm_head_bias
    parts = (x, weight, bias, drafts, valid, weights.float(), lm_head, teacher, chunk)
    return _ChunkedLosses.apply(*parts)  # type: ignore[no-any-return,no-untyped-call]


class Teacher:
    """The target's distribution over labels; of the draft vocabulary's, if there is one."""

    def __init__(
        self,
        states: Tensor,  # [N, H], what the target's LM head sees
        lm_head: LMHead,  # over the whole vocabulary
        temperatures: Tensor,  # fp32 [N]; 0 is the token itself
        token_map: Tensor | None,
    ) -> None:
        self.states, self.lm_head, self.temperatures = states.detach(), lm_head, temperatures
        self.token_map = token_map
        self.greedy = temperatures == 0  # [N]
        self.any_greedy = bool(self.greedy.any())

    @torch.no_grad()
    def after(self, start: int, stop: int, num_heads: int) -> Tensor:
        """Of what follows rows start + 1 ...: fp32 [stop - start + num_heads - 1, V_draft]."""
        rows = slice(start + 1, stop + num_heads)
        logits = self.lm_head(self.states[rows]).float()
        temperature = self.temperatures[rows, None].clamp(min=1e-4)  # 0: see `labels_of`
        if self.token_map is None:
            soft = (logits / temperature).softmax(-1)
        else:  # what is outside counts for the sum, though no head can say it
            logits = logits / temperature
            soft = (logits[:, self.token_map] - logits.logsumexp(-1, keepdim=True)).exp()
        lacking = stop - start + num_heads - 1 - len(soft)  # at the end, where no label is
        return F.pad(soft, (0, 0, 0, lacking)) if lacking else soft

    def labels_of(self, soft: Tensor, rows: slice, label: Tensor) -> Tensor:
        """Replace the distribution by the token itself where the text was chosen greedily."""
        if not self.any_greedy:
            return soft
        sure = (label != IGNORED).to(soft)[:, None]
        hot = torch.zeros_like(soft).scatter_(1, label.clamp(min=0)[:, None], sure)
        return torch.where(self.greedy[rows, None], hot, soft)


class _ChunkedLosses(torch.autograd.Function):
    """Loss and gradients at once: what flows back is only the loss's scalar factor."""

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
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = x.shape[1]
        sums = torch.zeros(count, device=x.device)
        grads = [
            torch.zeros(t.shape, device=t.device) if t is not None and t.requires_grad else None
            for t in (x, weight, bias)
        ]
        on_cpu = x.device.type == "cpu"
        for start in range(0, len(x), chunk):
            rows = slice(start, min(start + chunk, len(x)))
            if on_cpu and not bool(valid[rows].any()):
                continue  # a prompt; elsewhere finding out would wait for the device
            after = None if teacher is None else teacher.after(rows.start, rows.stop, count)
            for head in range(count):
                label, soft = labels[rows, head], None
                if teacher is not None and after is not None:
                    soft = teacher.labels_of(after[head : head + len(label)], rows, label)
                slot = head if weight is not None and len(weight) > 1 else 0
                places: list[Any] = [(rows, head), slot, slot]
                leaves = [
                    None if t is None else t[place].detach().requires_grad_(grad is not None)
                    for t, place, grad in zip((x, weight, bias), places, grads, strict=True)
                ]
                with torch.enable_grad():
                    logits = _logits(leaves, lm_head).float()
                    entropy = _cross_entropy(logits, label, valid[rows, head], soft)
                sums[head] += entropy.detach()
                wanted = [i for i, grad in enumerate(grads) if grad is not None]
                if not wanted:
                    continue
                inputs = [leaf for i in wanted if (leaf := leaves[i]) is not None]
                found = torch.autograd.grad(entropy, inputs)
                for i, gradient in zip(wanted, found, strict=True):
                    grads[i][places[i]] += gradient.float() * weights[head]  # type: ignore[index]
        ctx.save_for_backward(*(None if g is None else g.to(x.dtype) for g in grads))
        ctx.mark_non_differentiable(sums)
        return (sums * weights).sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        factor = upstream[0]
        scaled = [None if g is None else g * factor.to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None, None)


def _logits(leaves: list[Tensor | None], lm_head: LMHead | None) -> Tensor:
    state, matrix, vector = leaves
    assert state is not None
    if matrix is not None:
        return F.linear(state, matrix, vector)
    assert lm_head is not None
    return lm_head(state)


def _cross_entropy(logits: Tensor, label: Tensor, valid: Tensor, soft: Tensor | None) -> Tensor:
    """Sum over rows: logits fp32 [n, V], label int64 [n], valid bool [n], soft [n, V] -> scalar."""
    if soft is None:
        label = label.masked_fill(~valid, IGNORED)
        return F.cross_entropy(logits, label, ignore_index=IGNORED, reduction="sum")
    mass = soft.sum(-1)  # below 1 with a token map
    entropy = mass * logits.logsumexp(-1) - (soft * logits).sum(-1)
    return entropy.masked_fill(~valid, 0.0).sum()
