"""What both runners need of a drafter."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from vllm_medusa.noise import Stream
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import DraftTrees


class Drafter(Protocol):
    """A drafter: Medusa or Hydra heads, an EAGLE drafter, or an MTP module.

    To add heads that read only the target's hidden state, add a branch to
    `medusa_drafter.MedusaDrafter`, `proposer.steps.propose_tree` and `options._dynamic`, and a
    step class in `proposer.steps`. For a drafter with its own KV cache, like
    `eagle_trees.EagleTrees`, see CONTRIBUTING.md.
    """

    tree: TreeTensors | None  # one static tree for all requests; None: dynamic trees
    scratch: int  # KV slots after a request's tokens that drafting uses

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter for the loaded target."""
        ...

    def draft(
        self,
        states: Any,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
        min_survival: float | None = None,
        stream: Stream | None = None,
    ) -> DraftTrees:
        """A tree for each request, equal on all ranks.

        Args:
            states: Inputs of B requests: for heads the target's hidden states
                [B, H] at the last accepted nodes, for EAGLE drafters `eagle_trees.Roots`.
            root: int64 [B], the last sampled tokens.
            num_nodes: Nodes of each tree, root included.
            max_depth: int64 [B], max useful depth per request. If above 0, the request has
                ``scratch`` slots.
            limit: Max useful drafts per request, at least 1; also an upper bound of levels.
                None: all.
            min_survival: Deep heads run only if some draft reaches this survival. None: always.
            stream: The noise of the requests' next tokens. None: no request samples.

        """
        ...
