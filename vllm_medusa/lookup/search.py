r"""Where requests' last tokens stood before and what followed them, as chains of their trees.

    text          a b c d e a b c        the last three stood at 0 already
    matched 3, start 3                   so d e may follow, and then a b c d e ... again

Of all places the one counts that agrees over most tokens, of equally good ones the latest. The
continuation is a chain below the root. As far as its tokens are nodes of the tree, these are shared
and as likely as the likelier of the two says; the rest hangs below the last shared node.

    tree   0          chain  x y z      joined  0
          / \                                  / \
         x   w                                x   w        x is shared
         |                                   / \
         v                                  v   y
                                                 \
                                                  z

On a GPU the search and the joining are a kernel each (`kernel`); the functions that end in
``_torch`` do the same on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.tree.drafts import FROM_BOTH, FROM_LOOKUP, IMPOSSIBLE, DraftTrees

MAX_MATCH = 32  # tokens that are compared
MIN_MATCH = 2  # tokens that have to agree


def continuations(
    texts: Tensor,  # integer [rows, L]
    rows: Tensor,  # int64 [B], each request's row
    lengths: Tensor,  # int64 [B], of the requests' texts
    count: int,
) -> tuple[Tensor, Tensor]:
    """How many of the last tokens stood before, and ``count`` tokens that followed them there.

    int64 [B] and [B, count]; at the end of the text they repeat. Any tokens where none agree.
    """
    if uses_kernel(texts.device.type):
        from vllm_medusa.lookup import kernel

        return kernel.continuations(texts, rows, lengths, count)
    return continuations_torch(texts, rows, lengths, count)


def continuations_torch(
    texts: Tensor, rows: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """`continuations` by torch alone."""
    texts = texts[rows]  # [B, L]
    matched, start = _longest_matches(texts, lengths)
    period = (lengths - start).clamp_min(1)[:, None]
    places = torch.arange(count, device=texts.device)
    return matched, texts.gather(1, start[:, None] + places % period).to(torch.int64)


def _longest_matches(texts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last tokens stood before, and where what followed begins: int64 [B], [B].

    (0, 0): nowhere. One pass over the texts [B, L] finds where the last `MIN_MATCH` tokens stood;
    all others are compared at these few places only.
    """
    size, steps = texts.shape[1], torch.arange(MAX_MATCH, device=texts.device)
    last = lengths - 1
    ending = texts.gather(1, (last[:, None] - steps).clamp_min(0))  # [B, MAX_MATCH]
    first = MIN_MATCH - 1  # the first place that has so many tokens
    same = torch.arange(first, size, device=texts.device) < last[:, None]
    for back in range(MIN_MATCH):
        same &= texts[:, first - back : size - back] == ending[:, back : back + 1]

    def agreeing(request: Tensor, place: Tensor) -> Tensor:
        before = place[:, None] - steps  # [P, MAX_MATCH]
        equal = (texts[request[:, None], before.clamp_min(0)] == ending[request]) & (before >= 0)
        return equal.cumprod(1).sum(1)

    # The latest place is mostly as good as any, in texts that repeat themselves above all.
    place = torch.arange(first, size, device=texts.device)
    latest = torch.where(same, place, 0).amax(1) if size > first else torch.zeros_like(last)
    request = torch.arange(len(texts), device=texts.device)
    matched = agreeing(request, latest) * (latest > 0)
    same &= (matched < MAX_MATCH)[:, None]
    request, place = same.nonzero(as_tuple=True)
    place = place + first
    best = matched * size + latest
    best = best.scatter_reduce(0, request, agreeing(request, place) * size + place, "amax")
    matched = torch.div(best, size, rounding_mode="floor")
    found = matched >= MIN_MATCH
    return matched * found, (best % size + 1) * found


def join(trees: DraftTrees, chain: Tensor, log_survival: Tensor, levels: int) -> DraftTrees:
    """The best nodes of ``trees`` and of a chain below each root.

    Args:
        trees: N nodes each, as the result has.
        chain: int64 [B, D].
        log_survival: float32 [B, D], falling; -inf behind its end.
        levels: bound of the depth of ``trees``.

    """
    if uses_kernel(chain.device.type):
        from vllm_medusa.lookup import kernel

        return kernel.join(trees, chain, log_survival, levels)
    return join_torch(trees, chain, log_survival, levels)


def join_torch(trees: DraftTrees, chain: Tensor, log_survival: Tensor, levels: int) -> DraftTrees:
    """`join` by torch alone."""
    nodes, size = trees.parents.shape[1], chain.shape[1]
    values, source = trees.log_survival, trees.source
    at = chain.new_zeros((len(chain), 1))  # the last shared node
    shared = torch.zeros_like(at)
    follows = log_survival.isfinite()
    for level in range(min(levels, size)):
        token, surer = chain[:, level, None], log_survival[:, level, None]
        same = (trees.parents == at) & (trees.token_ids == token) & values.isfinite()
        goes_on = (shared == level) & same.any(1, keepdim=True) & follows[:, level, None]
        if not bool(goes_on.any()):
            break
        at = torch.where(goes_on, same.to(torch.int8).argmax(1, keepdim=True), at)
        surer = torch.where(goes_on, values.gather(1, at).maximum(surer), values.gather(1, at))
        values = values.scatter(1, at, surer)
        source = torch.where(goes_on, source.scatter(1, at, FROM_BOTH), source)
        shared = shared + goes_on
    places = torch.arange(size, device=chain.device)
    own = torch.where(places < shared, IMPOSSIBLE, log_survival)
    below = torch.where(places == shared, at, nodes - 1 + places)
    both = DraftTrees(
        torch.cat([trees.token_ids, chain.clamp_min(0)], 1),
        torch.cat([trees.parents, below], 1),
        torch.cat([values, own], 1),
        torch.cat([source, torch.full_like(chain, FROM_LOOKUP)], 1),
    )
    order = both.log_survival.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    return both.nodes(order)
