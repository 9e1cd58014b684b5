"""Lookup where texts are tensors: whole batches at once, without waiting for the device.

The same as `Lookup` does request by request on the host: matches, continuations, what is believed
of them, one tree of both. Slots tell the requests apart: a text is the row of its request's slot in
a table of all texts. On a GPU search and joining are a kernel each (`kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.lookup.chances import BUCKET, MOST, PRIOR, TRUST, WINDOW
from vllm_medusa.lookup.lookup import LEAST
from vllm_medusa.lookup.merge import BY_BOTH, BY_CHAIN
from vllm_medusa.lookup.search import LONGEST, SHORTEST


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """Trees of B requests, N nodes each, best first, parents before their children."""

    token_ids: Tensor  # int64 [B, N], the root's unread
    parents: Tensor  # int64 [B, N], -1 for the root
    log_survival: Tensor  # float32 [B, N], not increasing; 0 for the root, -inf for padding
    proposed_by: Tensor  # int64 [B, N], see `merge`


class LookupOnDevice:
    """Finds continuations for the requests of an engine and learns how far they can be trusted."""

    def __init__(
        self, vocab_size: int, max_requests: int, most: int, device: torch.device | str
    ) -> None:
        """Begin with nothing found.

        Args:
            vocab_size: of the target.
            max_requests: slots.
            most: tokens of a continuation.
            device: where texts are.

        """
        self._vocab_size, self._most = vocab_size, most
        with torch.inference_mode(False):  # else only inference mode could write to them
            self._bucket = torch.from_numpy(BUCKET).to(device)  # int64 [1 + LONGEST]
            self._prior = torch.tensor(PRIOR, dtype=torch.float32, device=device)  # [2, buckets]
            self._right, self._tried = torch.zeros(2, *self._prior.shape, device=device)
            # of each slot: what was found, how many tokens agreed, at which length of the text
            self._found = torch.full((max_requests, most), -1, device=device)  # int64
            self._matched = torch.zeros(max_requests, dtype=torch.int64, device=device)
            self._length = torch.full((max_requests,), -1, device=device)  # int64

    def forget(self) -> None:
        """Begin anew, with nothing learned."""
        for part in (self._right, self._tried):
            part.zero_()
        self._length.fill_(-1)

    @property
    def chances(self) -> Tensor:
        """float32 [2, 1 + LONGEST]: of the next token, by tokens that agree; greedy, sampled."""
        chance = (self._right + TRUST * self._prior) / (self._tried + TRUST)
        return chance.clamp_max(MOST)[:, self._bucket]

    def learn(
        self, slots: Tensor, texts: Tensor, lengths: Tensor, said: Tensor, sampled: Tensor
    ) -> None:
        """Compare what requests said with what was found for them last.

        Args:
            slots: int64 [B].
            texts: integer [slots, L], prompts and outputs.
            lengths: int64 [B], of the requests' texts.
            said: int64 [B], how many of a text's last tokens are new.
            sampled: bool [B], whether a request samples.

        """
        found = self._found[slots]  # [B, most]
        places = torch.arange(self._most, device=slots.device)
        before = self._length[slots]
        known = (found >= 0).sum(1).minimum(said).masked_fill(before + said != lengths, 0)
        new = texts[slots[:, None], (before[:, None] + places).clamp(0, texts.shape[1] - 1)]
        right = ((found == new) & (places < known[:, None])).cumprod(1).sum(1)
        tried = right + (right < known)
        agree = (self._matched[slots][:, None] + places).clamp_max(LONGEST)
        cells = self._bucket[agree] + sampled[:, None] * self._prior.shape[1]
        rights, tries = (
            torch.zeros_like(self._prior.view(-1))
            .index_add_(0, cells.flatten(), (places < end[:, None]).flatten().to(torch.float32))
            .view_as(self._prior)
            for end in (right, tried)
        )
        kept = (-tries / WINDOW).exp()
        self._right.mul_(kept).add_(rights)
        self._tried.mul_(kept).add_(tries)
        self._length.index_fill_(0, slots, -1)

    def extend(
        self,
        slots: Tensor,
        texts: Tensor,
        lengths: Tensor,
        trees: DraftTrees,
        depth: Tensor,
        sampled: Tensor,
        levels: int,
    ) -> DraftTrees:
        """Requests' trees with what may be copied.

        Args:
            slots: int64 [B].
            texts: integer [slots, L], prompts and outputs.
            lengths: int64 [B], of the requests' texts.
            trees: that were drafted for them.
            depth: int64 [B], the deepest node that each has a use for; 0: nothing is copied.
            sampled: bool [B], whether it samples.
            levels: bound of the depth of ``trees``.

        """
        matched, found = continuations(texts, slots, lengths, self._most)
        places = torch.arange(self._most, device=slots.device)
        strange = (found < 0) | (found >= self._vocab_size)
        ends = (strange | (places >= depth[:, None]) | (matched == 0)[:, None]).cumsum(1) > 0
        found = found.masked_fill(ends, -1)
        self._found.index_copy_(0, slots, found)
        self._matched.index_copy_(0, slots, matched)
        self._length.index_copy_(0, slots, lengths.to(torch.int64))
        agree = (matched[:, None] + places).clamp_max(LONGEST)
        survival = self.chances[sampled.to(torch.int64)[:, None], agree].cumprod(1)
        survival = survival.masked_fill(ends | (survival < LEAST), 0.0)
        return merge(trees, found, survival.log(), levels)


def continuations(
    texts: Tensor, slots: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """How many of the last tokens stood before, and ``count`` tokens that followed them there.

    int64 [B] and [B, count]; any tokens where none agree. See `search.continuation`. The texts of
    ``slots`` (int64 [B]), of ``lengths`` (int64 [B]), are rows of ``texts`` (integer [slots, L]).
    """
    if uses_kernel(texts.device.type):
        from vllm_medusa.lookup import kernel

        return kernel.continuations(texts, slots, lengths, count)
    return continuations_torch(texts, slots, lengths, count)


def continuations_torch(
    texts: Tensor, slots: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """`continuations` by torch alone."""
    texts = texts[slots]  # [B, L]
    matched, start = longest_matches(texts, lengths)
    around = (lengths - start).clamp_min(1)[:, None]
    places = torch.arange(count, device=texts.device)
    return matched, texts.gather(1, start[:, None] + places % around).to(torch.int64)


def longest_matches(texts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last tokens stood before, and where they went on: int64 [B], [B].

    (0, 0): nowhere. See `search.longest_match`; texts are integer [B, L] of ``lengths``.
    """
    size = texts.shape[1]
    places = torch.arange(size, device=texts.device)
    last = (lengths - 1)[:, None]
    ending = texts.gather(1, (last - torch.arange(LONGEST, device=texts.device)).clamp_min(0))
    same = places < last  # [B, L]
    agree = torch.zeros_like(texts, dtype=torch.int64)
    for back in range(min(LONGEST, size)):
        same[:, back:] &= texts[:, : size - back] == ending[:, back : back + 1]
        same[:, :back] = False
        agree += same
    best = (agree * size + places).amax(1)  # the longest, of these the latest
    matched = torch.div(best, size, rounding_mode="floor")
    found = matched >= SHORTEST
    return matched * found, (best % size + 1) * found


def merge(trees: DraftTrees, chain: Tensor, log_survival: Tensor, levels: int) -> DraftTrees:
    """The best nodes of ``trees`` and of a chain each; see `merge.merge`.

    Args:
        trees: N nodes each, as the result has.
        chain: int64 [B, D].
        log_survival: float32 [B, D], falling; -inf behind its end.
        levels: bound of the depth of ``trees``.

    """
    if uses_kernel(chain.device.type):
        from vllm_medusa.lookup import kernel

        fields = trees.token_ids, trees.parents, trees.log_survival, trees.proposed_by
        return DraftTrees(*kernel.merge(*fields, chain, log_survival, levels))
    return merge_torch(trees, chain, log_survival, levels)


def merge_torch(trees: DraftTrees, chain: Tensor, log_survival: Tensor, levels: int) -> DraftTrees:
    """`merge` by torch alone."""
    batch, nodes = trees.token_ids.shape
    size, device = chain.shape[1], chain.device
    values, by = trees.log_survival.clone(), trees.proposed_by.clone()
    at = chain.new_zeros((batch, 1))  # the node that the chain has come to
    shared = chain.new_zeros((batch, 1))
    going = torch.ones_like(at, dtype=torch.bool)
    for level in range(min(levels, size)):
        same = (trees.parents == at) & (trees.token_ids == chain[:, level : level + 1])
        same &= values.isfinite()
        going = going & same.any(1, keepdim=True) & log_survival[:, level : level + 1].isfinite()
        at = torch.where(going, same.to(torch.int8).argmax(1, keepdim=True), at)
        surer = values.gather(1, at).maximum(log_survival[:, level : level + 1])
        values = torch.where(going, values.scatter(1, at, surer), values)
        by = torch.where(going, by.scatter(1, at, BY_BOTH), by)
        shared = shared + going
    places = torch.arange(size, device=device)
    own = torch.where(places < shared, -float("inf"), log_survival)
    below = torch.where(places == shared, at, nodes - 1 + places)
    values = torch.cat([values, own], 1)
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    place = torch.zeros_like(values, dtype=torch.int64)
    place.scatter_(1, order, torch.arange(nodes, device=device).expand_as(order))
    parents = torch.cat([trees.parents, below], 1).gather(1, order).clamp_min(0)
    parents = place.gather(1, parents)
    parents[:, 0] = -1
    return DraftTrees(
        torch.cat([trees.token_ids, chain.clamp_min(0)], 1).gather(1, order),
        parents,
        values.gather(1, order),
        torch.cat([by, torch.full_like(chain, BY_CHAIN)], 1).gather(1, order),
    )
