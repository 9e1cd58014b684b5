"""The draft vocabulary: the tokens that a target writes, which are few of all that it knows.

Heads read the LM head's rows of these tokens only (FR-Spec, https://arxiv.org/abs/2502.14856).
What heads can't draft the target still writes, one token per step.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from vllm_medusa.offline.records import Record

COVERAGE = 0.99  # of the generated tokens
SMALLEST, LARGEST, MULTIPLE = 4096, 16384, 1024


def count_tokens(records: Iterable[Record], vocab_size: int) -> Tensor:
    """How often each token was generated: int64 [V]."""
    written = chain.from_iterable(r.token_ids[s:e] for r in records for s, e in r.generated)
    return torch.bincount(
        torch.tensor(array("q", written), dtype=torch.int64), minlength=vocab_size
    )


def usual_size(records: Sequence[Record], vocab_size: int) -> int | None:
    """The fewest tokens that cover `COVERAGE`, within bounds; None: a vocabulary as small as that.

    The tokens that half of the prompts have most are to cover the other half's: few texts say
    little of others, and their own tokens cover all of them.
    """
    if vocab_size <= LARGEST:
        return None
    prompts = {key: i for i, key in enumerate(dict.fromkeys(r.prompt_key for r in records))}
    one, other = (
        count_tokens([r for r in records if prompts[r.prompt_key] % 2 == half], vocab_size)
        for half in (0, 1)
    )
    covered = other[frequent_order(one)].cumsum(0)
    fewest = int((covered < COVERAGE * max(1, int(covered[-1]))).sum()) + 1
    return min(LARGEST, max(SMALLEST, -(-fewest // MULTIPLE) * MULTIPLE))


def frequent_order(counts: Tensor) -> Tensor:
    """All tokens, those that were generated most first; ties go to the lower id."""
    return counts.sort(descending=True, stable=True).indices


def frequent_tokens(counts: Tensor, size: int, always: Collection[int] = ()) -> Tensor:
    """The ``size`` tokens that were generated most, ``always`` among them: int64, ascending.

    Tokens that never occur fill up, lowest first: with most tokenizers the commonest ones.
    """
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return frequent_order(ranked)[:size].sort().values


def coverage(counts: Tensor, token_map: Tensor) -> float:
    """Share of the generated tokens that are in ``token_map``."""
    return int(counts[token_map].sum()) / max(1, int(counts.sum()))
