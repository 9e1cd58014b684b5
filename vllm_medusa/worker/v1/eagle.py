"""EAGLE drafters as vLLM loads them, drafting trees over their own KV cache.

A drafter's layer sees features of the target, shifted by one: its entry at position p is made of
the target's hidden states there and of the token at p + 1. So the entries of all accepted tokens
can be exact, and are: after each verification the accepted path goes through the drafter with the
target's own hidden states, into the path's slots. Branches are scratch behind them. A branch's
hidden states are the drafter's own guesses; the next prefill writes over what they left.

    slots    | exact, up to the token before x ............ | scratch: level 1 | level 2 | ...
    tokens     t1 t2 ... x (drawn last)                       k nodes            k nodes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_medusa.proposer.build import build_tree, clean
from vllm_medusa.proposer.candidates import Choices, Proposal
from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.worker.cpu_attention import BranchMetadata
from vllm_medusa.worker.eagle import check_vocabulary
from vllm_medusa.worker.options import EngineOptions


@dataclass(frozen=True)
class AcceptedPaths:
    """The tokens that the latest step made sure of, request by request: T of B requests."""

    counts: Tensor  # int64 [B], of each request, from 1
    next_ids: Tensor  # integer [T], the token after each
    positions: Tensor  # int64 [T]
    features: Tensor  # [T, features], the target's hidden states
    block_table: Tensor  # integer [B, blocks]
    ends: Tensor  # int64 [B], the position after each request's last


@dataclass(frozen=True)
class Roots:
    """Where B requests' trees begin: the drafter's states at their last exact entries."""

    normed: Tensor  # [B, H], what its LM head takes
    hidden: Tensor  # [B, H], what its next step takes
    ends: Tensor  # int64 [B], exact entries
    block_table: Tensor  # integer [B, blocks]

    def __getitem__(self, requests: list[int]) -> Roots:
        """Those of some requests."""
        index = torch.tensor(requests)
        parts = (self.normed, self.hidden, self.ends, self.block_table)
        return Roots(*(part[index] for part in parts))


class EagleTreeDrafter(EagleProposer):
    """vLLM's proposer for its module, weights and cache groups; the drafting is ours."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        tree = EngineOptions.of(vllm_config).tree
        assert isinstance(tree, DynamicTree) and isinstance(tree.pool, Beam)
        self.beam = tree.pool
        self.tree = None  # none that is static
        self._target_ids: Tensor | None = None  # int64 [V_draft]; None: the vocabularies are one

    @property
    def layer_names(self) -> set[str]:
        """Its attention layers."""
        return set(self._draft_attn_layer_names)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which may share the target's embedding and LM head."""
        super().load_model(target_model)
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        if offsets is not None:
            ids = torch.arange(len(offsets), device=offsets.device) + offsets
            check_vocabulary(ids, self.vllm_config.model_config.get_vocab_size())
            self._target_ids = ids

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """One forward pass, where vLLM makes one for each draft token."""
        args = args[:1]
        kwargs |= {"is_graph_capturing": True}
        super().dummy_run(num_tokens, *args, **kwargs)

    @torch.inference_mode()
    def prefill(self, paths: AcceptedPaths) -> Roots:
        """Make the entries of the accepted tokens, exactly."""
        features = paths.features
        if self.method == "eagle3":
            features = self.model.combine_hidden_states(features)
        owners = torch.repeat_interleave(torch.arange(len(paths.counts)), paths.counts)
        starts = torch.nn.functional.pad(paths.counts.cumsum(0), (1, 0)).to(torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=paths.ends.to(torch.int32),
            num_reqs=len(paths.counts),
            num_actual_tokens=len(owners),
            max_query_len=int(paths.counts.max()),
            max_seq_len=int(paths.ends.max()),
            block_table_tensor=paths.block_table,
            slot_mapping=self._slots(paths.block_table[owners], paths.positions[:, None])[:, 0],
        )
        normed, hidden = self._forward(common, paths.next_ids, paths.positions, features)
        last = starts[1:].to(torch.int64) - 1
        return Roots(normed[last], hidden[last], paths.ends, paths.block_table)

    @torch.inference_mode()
    def grow(
        self,
        roots: Roots,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
    ) -> Proposal:
        """Draft a tree for each request.

        Args:
            roots: of B requests.
            root: int64 [B], the tokens that the target gave last.
            num_nodes: Nodes of each tree, root included.
            max_depth: int64 [B], the deepest node that each request has a use for.
            limit: Drafts of a request that are of use, from 1; the best so many lie no deeper, so
                as many levels are expanded at most. None: all.

        """
        beam = replace(self.beam, depth=min(self.beam.depth, int(max_depth.max())))
        return build_tree(_Branches(self, roots), beam, root, num_nodes, max_depth, limit)

    def choices(self, normed: Tensor, width: int) -> Choices:
        """The best tokens after states [B, k, H]."""
        rows = normed.flatten(0, 1)
        logits = self.model.logits_processor(self.model.lm_head, rows).float()
        logits = logits.unflatten(0, normed.shape[:2])  # [B, k, V_draft]
        ids = stable_topk(logits, width)
        log_confidence = clean(logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True))
        return Choices(ids if self._target_ids is None else self._target_ids[ids], log_confidence)

    def step(
        self,
        roots: Roots,
        level: int,
        token_ids: Tensor,  # int64 [B, k]
        hidden: Tensor,  # [B, k, H], of the nodes' parents
        seen: Tensor,  # bool [B, k, S], scratch that each node sees, the k the last of it
    ) -> tuple[Tensor, Tensor]:
        """Run one level of nodes: normed and hidden states, [B, k, H]."""
        (batch, width), size = token_ids.shape, seen.shape[2]
        nodes = torch.arange(size - width, size)
        slots = self._slots(roots.block_table, roots.ends[:, None] + nodes)
        starts = torch.arange(batch + 1, dtype=torch.int32) * width
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=(roots.ends + size).to(torch.int32),
            num_reqs=batch,
            num_actual_tokens=batch * width,
            max_query_len=width,
            max_seq_len=int(roots.ends.max()) + size,
            block_table_tensor=roots.block_table,
            slot_mapping=slots.flatten(),
        )
        positions = (roots.ends - 1 + level).repeat_interleave(width)
        branches = None if bool(seen.all()) else (seen, roots.ends)  # all of a chain is seen
        states = self._forward(
            common, token_ids.flatten(), positions, hidden.flatten(0, 1), branches
        )
        normed, hidden = (state.unflatten(0, (batch, width)) for state in states)
        return normed, hidden

    def _forward(
        self,
        common: CommonAttentionMetadata,
        token_ids: Tensor,  # [T]
        positions: Tensor,  # int64 [T]
        hidden: Tensor,  # [T, H]
        branches: tuple[Tensor, Tensor] | None = None,  # what nodes see; None: a chain
    ) -> tuple[Tensor, Tensor]:
        if branches is None:
            _, metadata = self.build_per_group_and_layer_attn_metadata(common)
        else:
            metadata = dict.fromkeys(
                self._draft_attn_layer_names, _branch_metadata(common, *branches)
            )
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=common.num_actual_tokens,
            slot_mapping=dict.fromkeys(self._draft_attn_layer_names, common.slot_mapping),
        ):
            normed, hidden = self.model(
                input_ids=token_ids.to(torch.int32),
                positions=positions,
                hidden_states=hidden,
                inputs_embeds=None,
            )
        return normed, hidden

    def _slots(self, block_table: Tensor, positions: Tensor) -> Tensor:
        """Cache slots, int64 [B, n], of n positions of each request."""
        blocks = torch.div(positions, self.block_size, rounding_mode="floor")
        offsets = positions - blocks * self.block_size
        return block_table.gather(1, blocks).to(torch.int64) * self.block_size + offsets


class _Branches:
    """The drafter at one step of B requests, as the builder of trees asks it."""

    def __init__(self, drafter: EagleTreeDrafter, roots: Roots) -> None:
        self.drafter, self.roots = drafter, roots
        self.hidden = roots.hidden.unsqueeze(1)  # [B, k, H] of the latest level
        self.seen = roots.ends.new_zeros((len(roots.ends), 1, 0), dtype=torch.bool)  # [B, k, S]

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """The choices below nodes, see `Branching`; the roots' own are exact already."""
        if level == 0:
            return self.drafter.choices(self.roots.normed.unsqueeze(1), width)
        own = torch.eye(tokens.shape[1], dtype=torch.bool).expand(len(tokens), -1, -1)
        self.seen = torch.cat([_of_parents(self.seen, parents), own], 2)
        hidden = _of_parents(self.hidden, parents)
        normed, self.hidden = self.drafter.step(self.roots, level, tokens, hidden, self.seen)
        return self.drafter.choices(normed, width)


def _of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """[B, k, n] of the level above, by int64 [B, k'] -> [B, k', n]."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[2]))


def _branch_metadata(common: CommonAttentionMetadata, seen: Tensor, base: Tensor) -> BranchMetadata:
    return BranchMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=None,
        base=base,
        seen=seen,
    )
