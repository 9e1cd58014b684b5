"""Root paths: from accepted nodes to the kept path and its emitted tokens.

B requests, N nodes each (padding included), D an upper bound of depths. A verification step emits
the accepted draft tokens and one more token: *recovered* if the path stops at an inner node,
*bonus* at a leaf. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeBatch

NO_TOKEN = -1  # padding of output_token_ids after the last emitted token


@dataclass(frozen=True, eq=False)
class Path:
    """The accepted path of each request, from the root down."""

    nodes: Tensor  # int64 [B, D + 1]; column 0 is the root; padded with the last node
    num_accepted: Tensor  # int64 [B], draft tokens on the path = depth of its last node
    last_node: Tensor  # int64 [B], its logits give the final token, its hidden state the next draft


@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of a verification step."""

    path: Path
    output_token_ids: Tensor  # int64 [B, D + 1]: accepted drafts, the final token, then NO_TOKEN

    @property
    def final_token(self) -> Tensor:
        """Int64 [B] recovered or bonus token: the root of the next step."""
        return self.output_token_ids.gather(1, self.path.num_accepted.unsqueeze(1)).squeeze(1)


def path_to_node(tree: TreeBatch, last_node: Tensor) -> Path:
    """The path from the root to ``last_node`` int64 [B], an existing node of each request."""
    last = last_node.unsqueeze(1)  # [B, 1]
    depth = tree.depths.gather(1, last)  # [B, 1]
    row = last.unsqueeze(2).expand(-1, 1, tree.max_nodes)
    on_path = tree.ancestors.gather(1, row).squeeze(1)  # [B, N]
    # One ancestor per depth; nodes off the path are written to an extra column, removed later.
    column = torch.where(on_path, tree.depths, tree.max_depth + 1)  # [B, N]
    index = _node_index(tree).expand_as(column)
    nodes = last.expand(-1, tree.max_depth + 2).scatter(1, column, index)[:, :-1]
    return Path(nodes=nodes, num_accepted=depth.squeeze(1), last_node=last_node)


def accept_path(tree: TreeBatch, node_accepted: Tensor, score: Tensor | None = None) -> Path:
    """The longest path of accepted nodes.

    ``node_accepted`` is bool [B, N]; the root counts as accepted and padding never does. Among
    equally deep nodes the highest ``score`` (float [B, N], NaN is lowest) is used, then the lowest
    index.
    """
    index = _node_index(tree)  # [N]
    stops = ~node_accepted & (index > 0)  # [B, N]; padding is never an ancestor
    reached = ~(tree.ancestors & stops.unsqueeze(1)).any(-1)  # [B, N]
    depth = torch.where(reached & tree.valid, tree.depths, -1)
    best = depth == depth.amax(1, keepdim=True)
    if score is not None:
        ranked = torch.where(best, score, -torch.inf).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best = best & (ranked == ranked.amax(1, keepdim=True))
    return path_to_node(tree, torch.where(best, index, tree.max_nodes).amin(1))


def close_path(path: Path, token_ids: Tensor, final_token: Tensor) -> Verdict:
    """The verdict of a path: its ``token_ids`` int64 [B, N], then ``final_token`` int64 [B]."""
    accepted = token_ids.gather(1, path.nodes).roll(-1, 1)  # [B, D + 1], token of depth d + 1
    column = torch.arange(accepted.shape[1], device=accepted.device)
    end = path.num_accepted.unsqueeze(1)
    tail = torch.where(column == end, final_token.unsqueeze(1), NO_TOKEN)
    return Verdict(path=path, output_token_ids=torch.where(column < end, accepted, tail))


def select_verdict(choose: Tensor, chosen: Verdict, other: Verdict) -> Verdict:
    """Request by request, ``chosen`` where ``choose`` bool [B] holds, else ``other``.

    For batches that mix rules, such as greedy and typical requests.
    """
    wide = choose.unsqueeze(1)
    return Verdict(
        path=Path(
            nodes=torch.where(wide, chosen.path.nodes, other.path.nodes),
            num_accepted=torch.where(choose, chosen.path.num_accepted, other.path.num_accepted),
            last_node=torch.where(choose, chosen.path.last_node, other.path.last_node),
        ),
        output_token_ids=torch.where(wide, chosen.output_token_ids, other.output_token_ids),
    )


def _node_index(tree: TreeBatch) -> Tensor:
    return torch.arange(tree.max_nodes, device=tree.parents.device)
