"""How often a label is among a head's best guesses, as serving would draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_medusa.training.losses import (
    CHUNK,
    IGNORED,
    AnyHeads,
    LMHead,
    draft_labels,
    head_losses,
)

TOP = 10


def token_ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """Rank of token ``ids`` [...] among ``logits`` [..., V], best is 0: int64 [...].

    Equal logits rank by id, lower first, as the proposer takes them.
    """
    own = logits.gather(-1, ids[..., None])
    ranks = (logits > own).sum(-1)
    equal = logits == own
    if bool((equal.sum(-1) > 1).any()):
        lower = torch.arange(logits.shape[-1], device=logits.device) < ids[..., None]
        ranks = ranks + (equal & lower).sum(-1)
    return ranks


@torch.no_grad()
def label_ranks(
    heads: AnyHeads,
    hidden_states: Tensor,  # [N, H]
    labels: Tensor,  # int64 [N, K] target ids, IGNORED where none
    lm_head: LMHead | None = None,  # over the draft vocabulary, for heads that store none
    *,
    path: Tensor | None = None,  # as for `head_losses`
    x: Tensor | None = None,  # likewise
    chunk: int = CHUNK,  # positions whose logits exist at a time, [chunk, K, V_draft]
) -> Tensor:
    """Rank of each label among its head's guesses, best is 0: int64 [N, K].

    Labels outside the draft vocabulary and ignored ones rank behind everything, and never among the
    best `TOP`.
    """
    drafts = draft_labels(labels, heads, IGNORED)
    if x is None:
        x = heads(hidden_states, None, path)  # [N, K, H]
    ranks = []
    for states, own in zip(x.split(chunk), drafts.split(chunk), strict=True):
        if heads.lm_head_weight is None and lm_head is not None:
            logits = lm_head(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        else:
            logits = heads.compute_logits(states)
        found = token_ranks(logits.float(), own.clamp_min(0))
        ranks.append(found.masked_fill(own < 0, max(heads.draft_vocab_size, TOP)))
    return torch.cat(ranks)


class Measurement:
    """Sums over labels, which add up over batches and processes.

    Attributes:
        sums: fp64 [K, 2 + 1 + TOP]: loss in nats, labels that have one, all labels, and those of
            each rank.

    """

    def __init__(self, num_heads: int) -> None:
        self.sums = torch.zeros(num_heads, 3 + TOP, dtype=torch.float64)

    @torch.no_grad()
    def measure(
        self,
        heads: AnyHeads,
        states: Tensor,
        labels: Tensor,
        lm_head: LMHead | None = None,
        path: Tensor | None = None,
        x: Tensor | None = None,
    ) -> None:
        """Add a batch of states [N, H]; see `label_ranks`."""
        ones = torch.ones(labels.shape[1], device=labels.device)
        found = head_losses(heads, states, labels, ones, lm_head, path=path, x=x)
        ranks = label_ranks(heads, states, labels, lm_head, path=path, x=x)
        self.add(found.sums, found.counts, ranks, labels)

    def add(self, losses: Tensor, counts: Tensor, ranks: Tensor, labels: Tensor) -> None:
        """Add a batch: sums of losses [K] over ``counts`` labels, ranks and labels [N, K]."""
        counted = labels != IGNORED
        at = torch.arange(TOP, device=ranks.device)
        hits = ((ranks[..., None] == at) & counted[..., None]).sum(0)
        columns = [losses[:, None], counts[:, None], counted.sum(0)[:, None], hits]
        self.sums += torch.cat([column.double().cpu() for column in columns], 1)

    def summary(self) -> dict[str, Any]:
        """Plain JSON: ``loss`` [K], ``labels`` of head 0, ``top`` [K][TOP]: share within i + 1.

        A label outside the draft vocabulary is missed by every guess, and has no loss.
        """
        loss, counts, labels, *hits = self.sums.T
        top = torch.stack(hits, 1).cumsum(1) / labels.clamp(min=1)[:, None]
        return {
            "labels": int(labels[0]),
            "loss": [round(value, 4) for value in (loss / counts.clamp(min=1)).tolist()],
            "top": [[round(value, 4) for value in row] for row in top.tolist()],
        }
