"""Lookup for the requests of an engine: what each may copy, and how often that was right.

How often the next token of a continuation is right, by how many tokens agree so far, is learned
while serving: from every continuation whose request went on, verified or not, as what the request
says next is known either way. Greedy requests copy more faithfully than sampled ones and are
counted apart. Old observations decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.lookup.search import MAX_MATCH, continuations, join
from vllm_medusa.tree.drafts import DraftTrees

MIN_SURVIVAL = 0.02  # of a copied token that is drafted
_ENDS = torch.tensor([1, 2, 3, 5, 8, 12, 18, 26, MAX_MATCH])  # the longest match of each bucket
_PRIOR = (
    (0.2, 0.35, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93),  # greedy
    (0.1, 0.2, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8),  # sampled
)
_PRIOR_TOKENS = 8.0  # that the prior is worth
_WINDOW = 256.0  # tokens over which a bucket is averaged
_MAX_CHANCE = 0.995


class Lookup:
    """Finds continuations and learns how far they can be trusted. Nothing waits for the device.

    Slots tell the requests apart: what is kept of a request is in its slot.
    """

    def __init__(
        self, vocab_size: int, num_slots: int, max_tokens: int, device: torch.device | str
    ) -> None:
        """``max_tokens`` bounds a continuation."""
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        with torch.inference_mode(False):  # else only inference mode could write to them
            self._prior = torch.tensor(_PRIOR, device=device)  # float32 [2, buckets]
            self._bucket = torch.searchsorted(_ENDS, torch.arange(MAX_MATCH + 1)).to(device)
            self._right, self._tried = torch.zeros(2, *self._prior.shape, device=device)
            # of each slot: what was found, how many tokens agreed, at which length of the text
            self._found = torch.full((num_slots, max_tokens), -1, device=device)  # int64
            self._matched = torch.zeros(num_slots, dtype=torch.int64, device=device)
            self._length = torch.full((num_slots,), -1, device=device)  # int64

    def forget(self) -> None:
        """Start again, with nothing learned."""
        self._right.zero_()
        self._tried.zero_()
        self._length.fill_(-1)

    @property
    def chances(self) -> Tensor:
        """float32 [2, 1 + MAX_MATCH]: of the next token, by matched tokens; greedy, sampled."""
        chance = (self._right + _PRIOR_TOKENS * self._prior) / (self._tried + _PRIOR_TOKENS)
        return chance.clamp_max(_MAX_CHANCE)[:, self._bucket]

    def learn(
        self,
        slots: Tensor,  # int64 [B]
        texts: Tensor,  # integer [rows, L], prompts and outputs
        rows: Tensor,  # int64 [B], each request's row of ``texts``
        lengths: Tensor,  # int64 [B], of the requests' texts
        num_new: Tensor,  # int64 [B], how many of a text's last tokens are new
        sampled: Tensor,  # bool [B], whether a request samples
    ) -> None:
        """Compare what requests said with what was found for them last."""
        found, before = self._found[slots], self._length[slots]  # [B, max_tokens], [B]
        places = torch.arange(self.max_tokens, device=slots.device)
        known = (found >= 0).sum(1).minimum(num_new).masked_fill(before + num_new != lengths, 0)
        new = texts[rows[:, None], (before[:, None] + places).clamp(0, texts.shape[1] - 1)]
        right = ((found == new) & (places < known[:, None])).cumprod(1).sum(1)
        tried = right + (right < known)
        agree = (self._matched[slots][:, None] + places).clamp_max(MAX_MATCH)
        cells = self._bucket[agree] + sampled[:, None] * self._prior.shape[1]
        rights, tries = (
            torch.zeros_like(self._prior.view(-1))
            .index_add_(0, cells.flatten(), (places < end[:, None]).flatten().to(torch.float32))
            .view_as(self._prior)
            for end in (right, tried)
        )
        kept = (-tries / _WINDOW).exp()
        self._right.mul_(kept).add_(rights)
        self._tried.mul_(kept).add_(tries)
        self._length.index_fill_(0, slots, -1)

    def extend(
        self,
        slots: Tensor,  # as for `learn`
        texts: Tensor,
        rows: Tensor,
        lengths: Tensor,
        trees: DraftTrees,  # that were drafted for the requests
        depth: Tensor,  # int64 [B], the deepest node that each has a use for; 0: nothing is copied
        sampled: Tensor,
        levels: int,  # bound of the depth of ``trees``
    ) -> DraftTrees:
        """The requests' trees with what may be copied."""
        matched, found = continuations(texts, rows, lengths, self.max_tokens)
        places = torch.arange(self.max_tokens, device=slots.device)
        no_token = (found < 0) | (found >= self._vocab_size)  # in place of an image, say
        ends = (no_token | (places >= depth[:, None]) | (matched == 0)[:, None]).cumsum(1) > 0
        found = found.masked_fill(ends, -1)
        self._found.index_copy_(0, slots, found)
        self._matched.index_copy_(0, slots, matched)
        self._length.index_copy_(0, slots, lengths)
        agree = (matched[:, None] + places).clamp_max(MAX_MATCH)
        survival = self.chances[sampled.to(torch.int64)[:, None], agree].cumprod(1)
        survival = survival.masked_fill(ends | (survival < MIN_SURVIVAL), 0.0)
        return join(trees, found, survival.log(), levels)
