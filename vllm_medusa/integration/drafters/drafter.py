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
    `medusa_drafter.MedusaDrafter`, `proposer.steps.propose_tree` and
    `startup.options._dynamic`, and a step class in `proposer.steps`. For a drafter with its own KV
    cache, like `eagle_trees.EagleTrees`, see CONTRIBUTING.md.
    """

    tree: TreeTensors | None  # one static tree for all requests; None: dynamic trees
    scratch: int  # KV slots after a request's tokens that drafting uses

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter for the loaded target."""
        ...

    def draft(
        self,
        states: Any,  # of B requests
        root: Tensor,  # int64 [B], the last sampled tokens
        num_nodes: int,  # of each tree, root included
        max_depth: Tensor,  # int64 [B], max useful depth; above 0, there are ``scratch`` slots
        limit: int | None = None,  # max useful drafts per request, >= 1, and levels; None: all
        min_survival: float | None = None,  # of some draft, for deep heads to run; None: always
        stream: Stream | None = None,  # the noise of the next tokens; None: no request samples
    ) -> DraftTrees:
        """A tree for each request, equal on all ranks.

        ``states`` are the target's hidden states [B, H] at the last accepted nodes for heads, and
        `eagle_trees.Roots` for EAGLE drafters.
        """
        ...
