"""How often a label is among a head's best guesses, as serving would draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.training.losses import (
    CHUNK,
    IGNORED,
    AnyHeads,
    HeadLosses,
    LMHead,
    draft_labels,
    head_losses,
)

TOP = 10


def token_ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """Place of token ``ids`` [...] among ``logits`` [..., V], best is 0: int64 [...].

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
    states: Tensor | None = None,  # ``x`` of it, [N, K, H]
    chunk: int = CHUNK,  # positions whose logits exist at a time, [chunk, K, V_draft]
) -> Tensor:
    """Place of each label among its head's guesses, best is 0: int64 [N, K].

    Labels outside the draft vocabulary and ignored ones rank behind everything, at V_draft, and not
    among the best `TOP`. Equal logits rank as in `token_ranks`.
    """
    behind = max(heads.draft_vocab_size, TOP)
    drafts = draft_labels(labels, heads, IGNORED)
    places = []
    for rows in range(0, len(hidden_states), chunk):
        own = drafts[rows : rows + chunk]  # [n, K]
        above = None if path is None else path[rows : rows + chunk]
        if states is None:
            x = heads(hidden_states[rows : rows + chunk], None, above)
        else:
            x = states[rows : rows + chunk]
        if heads.lm_head_weight is None and lm_head is not None:
            logits = lm_head(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # over the draft vocabulary
        else:
            logits = heads.compute_logits(x)
        ranks = token_ranks(logits.float(), own.clamp_min(0))
        places.append(ranks.masked_fill(own < 0, behind))
    return torch.cat(places)


@dataclass
class Measurement:
    """Sums over labels, which add up over batches and processes."""

    loss: Tensor  # fp64 [K] in nats, over `counts`
    counts: Tensor  # int64 [K], labels that the draft vocabulary has
    labels: Tensor  # int64 [K], all of them
    hits: Tensor  # int64 [K, TOP], those at each rank

    @classmethod
    def empty(cls, num_heads: int) -> Measurement:
        """Nothing measured."""
        return cls(
            torch.zeros(num_heads, dtype=torch.float64),
            torch.zeros(num_heads, dtype=torch.int64),
            torch.zeros(num_heads, dtype=torch.int64),
            torch.zeros(num_heads, TOP, dtype=torch.int64),
        )

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
        """Take in a batch of states [N, H]; see `label_ranks`."""
        ones = torch.ones(labels.shape[1], device=labels.device)
        found = head_losses(heads, states, labels, ones, lm_head, path=path, x=x)
        ranks = label_ranks(heads, states, labels, lm_head, path=path, states=x)
        self.add(found, ranks, labels)

    def add(self, found: HeadLosses, ranks: Tensor, labels: Tensor) -> None:
        """Take in a batch: its losses of hard labels, ranks and labels int64 [N, K]."""
        self.loss += found.sums.double().cpu()
        self.counts += found.counts.cpu()
        counted = labels != IGNORED
        self.labels += counted.sum(0).cpu()
        at = torch.arange(TOP, device=ranks.device)
        self.hits += ((ranks[..., None] == at) & counted[..., None]).sum(0).cpu()

    def packed(self) -> Tensor:
        """All sums in one fp64 vector."""
        counts = torch.cat([self.counts, self.labels, self.hits.flatten()])
        return torch.cat([self.loss, counts.double()])

    @classmethod
    def unpacked(cls, vector: Tensor, num_heads: int) -> Measurement:
        """Undo `packed`."""
        loss, counts, labels, hits = vector.split([num_heads] * 3 + [num_heads * TOP])
        return cls(loss, counts.long(), labels.long(), hits.long().view(num_heads, TOP))

    def summary(self) -> dict[str, Any]:
        """Plain JSON: ``loss`` [K], ``labels`` of head 0, ``top`` [K][TOP]: share within i + 1.

        A label outside the draft vocabulary is missed by every guess, and has no loss.
        """
        top = self.hits.cumsum(1).double() / self.labels.clamp(min=1)[:, None]
        return {
            "labels": int(self.labels[0]),
            "loss": [round(value, 4) for value in (self.loss / self.counts.clamp(min=1)).tolist()],
            "top": [[round(value, 4) for value in row] for row in top.tolist()],
        }
