"""The tokens that a step accepted: the input of an EAGLE drafter's next prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_medusa.sampler import Verdict

if TYPE_CHECKING:
    from vllm_medusa.integration.drafters.eagle_trees import EagleTrees

NO_SLOT = -1  # slot of entries that are not stored


@dataclass(frozen=True)
class Tokens:
    """T tokens, the input of the drafter's layer."""

    next_ids: Tensor  # integer [T], the next token of each
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], of their cache entries; or `NO_SLOT`
    features: Tensor  # [T, features], the target's hidden states

    def at(self, rows: Tensor) -> Tokens:
        """The tokens in ``rows``."""
        return Tokens(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class AcceptedPaths:
    """The tokens that the latest step accepted, T rows, request by request.

    If the counts are only on the device, each request has the max number of rows; rows after
    ``last`` have no slot, and no other row attends to them.
    """

    common: CommonAttentionMetadata  # of these rows; slots are `NO_SLOT` after ``last``
    last: Tensor  # int64 [B], the row of each request's last token
    tokens: Tokens
    ends: Tensor  # int64 [B], the position after each request's last token

    def ending(self) -> AcceptedPaths:
        """Only each request's last token; the entries of the others must be in the cache."""
        count, device = len(self.ends), self.ends.device
        tokens = self.tokens.at(self.last)
        common = replace(
            self.common,
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
            query_start_loc_cpu=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=self.ends.to(torch.int32),
            num_actual_tokens=count,
            max_query_len=1,
            slot_mapping=tokens.slots,
        )
        return AcceptedPaths(common, torch.arange(count, device=device), tokens, self.ends)


def accepted_paths(
    drafter: EagleTrees,
    verdict: Verdict | None,  # of the step; None without drafts
    deepest: int,  # upper bound of accepted drafts per request
    query_start: np.ndarray,  # integer [>= B], first row of each request
    scheduled: np.ndarray,  # integer [B], rows of each request
    num_drafts: np.ndarray,  # integer [B], number of drafts at the end of each
    computed: Tensor,  # int64 [B], computed tokens of each before the step
    input_ids: Tensor,  # integer [>= rows]
    next_tokens: Tensor,  # int64 [B], the token that follows the accepted ones
    features: Sequence[Tensor],  # [rows, H] each, hidden states of the target
    block_table: Tensor,  # int32 [B, blocks]
    longest: int,  # upper bound of tokens per request
) -> AcceptedPaths:
    """The accepted paths, each padded with rows to the max depth.

    A request's rows are those up to its root, then one node per depth. The node, and whether it
    was accepted, are known only on the device.
    """
    device, count = computed.device, len(scheduled)
    before = scheduled - num_drafts  # rows up to the root
    counts = (before + np.minimum(num_drafts, deepest)).astype(np.int64)
    starts = np.concatenate(([0], counts.cumsum()))
    owners = np.repeat(np.arange(count), counts)
    places = np.arange(starts[-1]) - starts[owners]
    depths = np.maximum(places - before[owners] + 1, 0)
    rows = query_start[owners] + np.minimum(places, before[owners] - 1)
    owner, place, depth, row = async_tensor_h2d(
        np.stack([owners, places, depths, rows]), device=device
    )
    first, root, size = async_tensor_h2d(np.stack([starts[:-1], before - 1, counts]), device=device)
    last, positions = root, computed[owner] + place
    slots = drafter.slots(block_table, owner, positions)
    if verdict is not None:
        path = verdict.path
        last = root + path.num_accepted
        row = row + path.nodes[owner, depth]
        slots = torch.where(depth <= path.num_accepted[owner], slots, NO_SLOT)
    next_ids = input_ids[row].roll(-1).to(torch.int64)
    common = CommonAttentionMetadata(
        query_start_loc=async_tensor_h2d(starts.astype(np.int32), device=device),
        query_start_loc_cpu=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=(computed + size).to(torch.int32),
        num_reqs=count,
        num_actual_tokens=len(rows),
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        block_table_tensor=block_table,
        slot_mapping=slots,
    )
    return AcceptedPaths(
        common=common,
        last=first + last,
        tokens=Tokens(
            next_ids=next_ids.index_copy(0, first + last, next_tokens),
            positions=positions,
            slots=slots,
            features=torch.cat([state[row] for state in features], -1),
        ),
        ends=computed + last + 1,
    )
