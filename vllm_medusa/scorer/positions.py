"""RoPE positions of tree nodes: context length plus depth, never context length plus index.

All functions are pure tensor arithmetic on any device, without host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_rows(
    cu_num_nodes: Tensor,  # integer [B + 1], from 0
    num_rows: int,
) -> tuple[Tensor, Tensor]:  # int64 [num_rows], int64 [num_rows]
    """Request and node of each row of the flattened batch.

    ``num_rows`` is ``cu_num_nodes[-1]``, known to the caller without a sync. For
    ``cu_num_nodes`` = [0, 3, 4] the result is ([0, 0, 0, 1], [0, 1, 2, 0]).
    """
    rows = torch.arange(num_rows, device=cu_num_nodes.device)
    starts = cu_num_nodes.to(torch.int64)
    request = torch.searchsorted(starts[1:], rows, right=True)
    return request, rows - starts[request]


def write_node_positions(
    positions: Tensor,  # integer [>= T], written in place
    base: Tensor,  # integer [B]
    depths: Tensor,  # integer [B, N]
    cu_num_nodes: Tensor,  # integer [B + 1], from 0
    num_rows: int,  # T = cu_num_nodes[-1]
    row_starts: Tensor | None = None,  # integer [B]; None: request b starts at cu_num_nodes[b]
) -> None:
    """Write each node's position into its row of a preallocated buffer.

    ``row_starts`` is for batches with other rows (a prefill chunk) between the trees:
    node i of request b goes to row ``row_starts[b] + i``. Other rows are unchanged.
    """
    request, node = ragged_rows(cu_num_nodes, num_rows)
    values = base[request] + depths[request, node].to(base.dtype)
    if row_starts is None:
        positions[:num_rows].copy_(values)
    else:
        rows = row_starts.to(torch.int64)[request] + node
        positions.index_copy_(0, rows, values.to(positions.dtype))
