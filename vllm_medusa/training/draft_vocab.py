"""The draft vocabulary: the tokens that a target writes, which are few of all that it knows.

Heads read the LM head's rows of these tokens only (FR-Spec, https://arxiv.org/abs/2502.14856).
What heads can't draft the target still writes, a token at a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from itertools import chain

import torch
from torch import Tensor

from vllm_medusa.offline.records import Record

COVERAGE = 0.99  # of the generated tokens
SMALLEST, LARGEST, MULTIPLE = 4096, 16384, 1024


def count_tokens(records: Iterable[Record], vocab_size: int) -> Tensor:
    """How often each token was generated: int64 [V]."""
    written = chain.from_iterable(r.token_ids[s:e] for r in records for s, e in r.generated)
    return torch.bincount(torch.tensor(array("q", written)), minlength=vocab_size)


def usual_size(counts: Tensor) -> int | None:
    """The fewest tokens that cover `COVERAGE`, within bounds; None: a vocabulary as small as that.

    ``counts`` int64 [V] are `count_tokens`'.
    """
    if len(counts) <= LARGEST:
        return None
    covered = counts.sort(descending=True).values.cumsum(0)
    fewest = int((covered < COVERAGE * covered[-1]).sum()) + 1
    return min(LARGEST, max(SMALLEST, -(-fewest // MULTIPLE) * MULTIPLE))


def frequent_tokens(counts: Tensor, size: int, always: Collection[int] = ()) -> Tensor:
    """The ``size`` tokens that were generated most, ``always`` among them: int64, ascending.

    Ties go to the lower id; tokens that never occur fill up, lowest first.
    """
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, token_map: Tensor) -> float:
    """Share of the generated tokens that are in ``token_map``."""
    return int(counts[token_map].sum()) / max(1, int(counts.sum()))
