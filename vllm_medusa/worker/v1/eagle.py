"""EAGLE drafters on the V1 runner: vLLM's proposer loads them, `EagleTrees` drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_medusa.proposer.candidates import Proposal
from vllm_medusa.worker.eagle import beam_of
from vllm_medusa.worker.eagle_trees import AcceptedPaths, EagleTrees, Roots
from vllm_medusa.worker.options import EngineOptions


class EagleTreeDrafter(EagleTrees, EagleProposer):
    """vLLM's proposer for its module, weights and cache groups; the drafting is ours."""

    stages = None  # no level rests

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.beam = beam_of(EngineOptions.of(vllm_config).tree)
        self.tree = None  # none that is static

    @property
    def groups(self) -> list[Any]:
        """Attention groups of its layers."""
        return self.draft_attn_groups

    @property
    def layer_names(self) -> set[str]:
        """Its attention layers."""
        return set(self._draft_attn_layer_names)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which may share the target's embedding and LM head."""
        super().load_model(target_model)
        self.read_vocabulary()

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """One forward pass, where vLLM makes one for each draft token."""
        args = args[:1]
        kwargs |= {"is_graph_capturing": True}
        super().dummy_run(num_tokens, *args, **kwargs)

    def grow(
        self,
        roots: Roots,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
    ) -> Proposal:
        """See `EagleTrees.grow`; no level is expanded that no request has a use for."""
        whole = self.beam
        self.beam = replace(whole, depth=min(whole.depth, int(max_depth.max())))
        try:
            return super().grow(roots, root, num_nodes, max_depth, limit)
        finally:
            self.beam = whole


def paths_of(
    drafter: EagleTrees,
    counts: Tensor,  # int64 [B], accepted tokens of each request, from 1
    next_ids: Tensor,  # integer [T]
    positions: Tensor,  # int64 [T]
    features: Tensor,  # [T, features]
    block_table: Tensor,  # int32 [B, blocks]
    ends: Tensor,  # int64 [B]
) -> AcceptedPaths:
    """The paths where the host knows how long they are."""
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return AcceptedPaths(
        starts=starts.to(torch.int32),
        starts_cpu=starts.to(torch.int32),
        most_rows=int(counts.max()),
        last=starts[1:] - 1,
        next_ids=next_ids,
        positions=positions,
        slots=drafter.slots(block_table, owners, positions),
        features=features,
        lengths=ends,
        longest=int(ends.max()),
        block_table=block_table,
        ends=ends,
    )
