"""Fraction of labels among a head's top choices, ranked as in serving."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.training.losses import CHUNK, AnyHeads, LMHead, draft_labels
from vllm_medusa.training.rows import IGNORED

TOP = 10


def token_ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """Ranks of the tokens ``ids`` [...] in ``logits`` [..., V]; 0 is the best: int64 [...].

    Equal logits rank by id, lower first, as in the proposer.
    """
    own = logits.gather(-1, ids[..., None])
    ranks = (logits > own).sum(-1)
    equal = logits == own
    if bool((equal.sum(-1) > 1).any()):
        lower = torch.arange(logits.shape[-1], device=logits.device) < ids[..., None]
        ranks = ranks + (equal & lower).sum(-1)
    return ranks


class Measurement:
    """Sums over labels, which are additive over batches and processes.

    Attributes:
        sums: fp64 [K, 3 + TOP]: loss in nats, labels with a loss, all labels, and labels at each
            rank.

    """

    def __init__(self, num_heads: int) -> None:
        self.sums = torch.zeros(num_heads, 3 + TOP, dtype=torch.float64)

    @torch.no_grad()
    def measure(
        self,
        heads: AnyHeads,
        x: Tensor,  # [N, K, H], the heads' states
        labels: Tensor,  # int64 [N, K] target ids, IGNORED if none
        lm_head: LMHead | None = None,  # over the draft vocabulary, for heads that store none
    ) -> None:
        """Add a batch; labels outside the draft vocabulary have no loss and count as misses."""
        drafts = draft_labels(labels, heads, IGNORED)
        size = max(1, CHUNK // labels.shape[1])  # positions per chunk of logits
        for states, own, wanted in zip(*(t.split(size) for t in (x, drafts, labels)), strict=True):
            shared = heads.lm_head_weight is None
            logits = lm_head(states) if lm_head and shared else heads.compute_logits(states)
            logits = logits.float()
            losses = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none")
            ranks, drafted = token_ranks(logits, own.clamp_min(0)), own != IGNORED
            hits = ranks[..., None] == torch.arange(TOP, device=ranks.device)  # [C, K, TOP]
            columns = [losses.view_as(own), drafted, wanted != IGNORED]
            found = torch.cat([torch.stack(columns, -1), hits & drafted[..., None]], -1)
            self.sums += found.sum(0, dtype=torch.float64).cpu()

    def summary(self) -> dict[str, Any]:
        """Plain JSON: ``loss`` [K], ``labels`` of head 0, ``top`` [K][TOP].

        ``top[k][i]`` is the fraction of labels among the best i + 1 choices of head k.
        """
        loss, counts, labels, *hits = self.sums.T
        top = torch.stack(hits, 1).cumsum(1) / labels.clamp(min=1)[:, None]
        return {
            "labels": int(labels[0]),
            "loss": [round(value, 4) for value in (loss / counts.clamp(min=1)).tolist()],
            "top": [[round(value, 4) for value in row] for row in top.tolist()],
        }
