"""The trees of one runner, V1 or V2, by request slot, from drafting to verification.

A slot is a running request's row in the tables here. On V2 slots are vLLM's; on V1 the runner
assigns them. A request may be verified some steps after it was drafted, and vLLM may truncate its
drafts to a prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_medusa.integration.attention import platform_attention
from vllm_medusa.integration.drafters.draft_messages import DraftMessage
from vllm_medusa.integration.drafters.drafter import Drafter
from vllm_medusa.integration.requests import RequestOptions
from vllm_medusa.integration.scheduling.grammar import Candidates
from vllm_medusa.integration.startup.checks import check_layers
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.lookup.search import Array
from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.cpu import topologies, write_positions
from vllm_medusa.scorer.step import TreeStep, write_node_positions
from vllm_medusa.tree.batch import TreeBatch
from vllm_medusa.tree.draft_trees import DraftTrees


class RequestTrees:
    """The requests' options and topologies by slot, and the current step."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        drafter: Drafter,
        device: torch.device,
        *,
        on_host: bool = False,  # whether the host may read the trees
    ) -> None:
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self.options = options = TreeSettings.of(vllm_config)
        self.num_nodes = options.tree.num_nodes  # max per request, root included
        self.static = drafter.tree
        self._scratch, self._max_model_len = drafter.scratch, model.max_model_len
        self._max_depth, self._on_host = max(options.tree.max_depth, options.depth), on_host
        slots = scheduler.max_num_seqs
        self.requests = RequestOptions(slots, options.acceptance, model.max_model_len, device)
        self.lookup: Lookup | None = None
        if options.lookup:
            drafts = options.tree.num_draft_tokens
            where = None if on_host else device
            self.lookup = Lookup(model.get_vocab_size(), slots, drafts, where)
        if self.static is None:
            with torch.inference_mode(False):  # otherwise writable only in inference mode
                # int64 [slots, N], of the last drafts; initially a root with children
                self.parents = torch.zeros(slots, self.num_nodes, dtype=torch.int64, device=device)
                self.parents[:, 0] = -1
        # parents of the drafts chosen by the scheduler for this step, by request
        self.chosen_parents: Mapping[str, list[int]] = {}
        self.step: TreeStep | None = None  # None: no request has drafts
        self.verdict: Verdict | None = None

    def bind(
        self, layers: Mapping[str, Any], kv_cache_config: Any, drafters: Collection[str]
    ) -> None:
        """Check the attention layers, and store those in which accepted paths are compacted.

        Layers in ``drafters`` are not stored: a drafter handles accepted paths itself.
        """
        check_layers(layers, kv_cache_config)
        self._layers = layers
        self._groups = {
            index: names
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if (names := [name for name in group.layer_names if name not in drafters])
        }

    def begin(
        self,
        slots: Tensor,  # int64 [B]
        req_ids: Sequence[str],
        num_nodes: np.ndarray,  # int64 [B], number of nodes each request verifies
        cu_nodes: Tensor,  # integer [B + 1]
        rows: Tensor,  # integer [sum of num_nodes], the runner's logits indices
        input_ids: Tensor,  # integer [T], the scheduled tokens, placeholders not yet replaced
        slot_mappings: dict[int, Tensor] | None = None,  # KV group -> [T]; None: given later
    ) -> TreeStep | None:
        """Lay out a step, without host sync; returns None if it has no drafts."""
        self.step = self.verdict = None
        if num_nodes.max(initial=1) > 1:

            def trees(width: int, counts: Tensor) -> TreeBatch:
                return self._with_chosen(self.topologies(slots, width, counts), req_ids, counts)

            self.step = TreeStep.build(trees, num_nodes, cu_nodes, rows, input_ids)
            self.step.slot_mappings = slot_mappings or {}
        return self.step

    @contextmanager
    def in_builders(self, builders: Iterable[Any]) -> Iterator[None]:
        """Within the block, metadata builders of tree attention have the step's trees."""
        builders = list(builders)
        for builder in builders:
            builder.step = self.step
        try:
            yield
        finally:
            for builder in builders:
                builder.step = None

    def end(self) -> Verdict | None:
        """End the step and return its verdict; a dummy step may follow without `begin`."""
        verdict, self.step, self.verdict = self.verdict, None, None
        return verdict

    def compact(self) -> None:
        """Move the accepted paths to contiguous slots, in every KV cache group and layer."""
        step, verdict = self.step, self.verdict
        if step is None or verdict is None:
            return
        move, path = platform_attention().compact_group, verdict.path
        for group, names in self._groups.items():
            move(self._layers, names, step.slots(group), path.nodes, path.num_accepted)

    def write_positions(self, positions: Tensor, base: Tensor) -> None:
        """Set each node's position to its context length plus its depth; slots are unchanged.

        ``positions`` integer [>= T], ``base`` integer [B].
        """
        step = self.step
        assert step is not None
        if self._on_host and positions.dtype == torch.int64:
            write_positions(positions, base, step.tree, step.root_rows)
            return
        write_node_positions(positions, base, step)

    def keep(self, slots: Tensor, parents: Tensor) -> None:
        """Store the topologies, int64 [B, N], of the drafts for the requests in ``slots``."""
        if self.static is None:
            parents = parents[:, : self.num_nodes]
            self.parents[:, : parents.shape[1]].index_copy_(0, slots, parents)

    def topologies(self, slots: Tensor, width: int, num_nodes: Tensor) -> TreeBatch:
        """The first ``num_nodes`` (integer [B]) nodes of the stored trees, ``width`` nodes wide."""
        if self.static is not None:
            return self.static.batch(width, num_nodes)
        parents = self.parents[:, :width].index_select(0, slots)
        if self._on_host:
            return topologies(parents, num_nodes)
        return TreeBatch.from_parents(parents, num_nodes, self._max_depth)

    def _with_chosen(self, batch: TreeBatch, req_ids: Sequence[str], counts: Tensor) -> TreeBatch:
        """Replace the trees by those chosen by the scheduler."""
        device, chosen = counts.device, self.chosen_parents
        rows = [row for row, name in enumerate(req_ids) if name in chosen] if chosen else []
        if rows:
            parents = np.full((len(rows), batch.max_nodes), -1, dtype=np.int64)
            for place, row in enumerate(rows):
                own = chosen[req_ids[row]]
                parents[place, 1 : 1 + len(own)] = own
            index = async_tensor_h2d(np.array(rows), device=device)
            batch = batch.with_trees(index, async_tensor_h2d(parents, device=device), counts[index])
        if self._on_host and (rows or self.static is not None):  # the exact depth
            batch = replace(batch, max_depth=int((batch.depths * batch.valid).max()))
        return batch

    def useful_depth(self, slots: np.ndarray, num_tokens: Array, num_new: Array) -> Any:
        """Max useful depth per request, int64 [B], array or tensor; 0: no drafts.

        ``num_tokens`` (integer [B]) counts its tokens so far, of which the last ``num_new``
        (integer [B]) are new; 0 in an unfinished prefill.
        """
        if self.static is not None:  # drafted whole
            return self.static.max_depth * (num_new > 0)
        depth = self.requests.useful_depth(slots, num_tokens) * (num_new > 0)
        if self._scratch:
            depth = depth * (num_tokens - 1 + self._scratch <= self._max_model_len)
        return depth

    def add_copies(
        self,
        drafts: DraftTrees,
        slots: Array,  # int64 [B]; these are arrays on the host, tensors on a device
        texts: Array,  # integer [rows, L], prompts and outputs
        rows: Array,  # int64 [B], the requests' rows in ``texts``
        num_tokens: Array,  # int64 [B], as for `useful_depth`
        num_new: Array,  # int64 [B]
        depth: Array,  # int64 [B]
        free: Array,  # bool [B], requests without a grammar
        sampled: Array,  # bool [B]
    ) -> DraftTrees:
        """Merge the drafts with lookup's from the requests' own texts."""
        assert self.lookup is not None
        self.lookup.learn(slots, texts, rows, num_tokens, num_new)
        levels = self.options.tree.max_depth
        return self.lookup.extend(
            slots, texts, rows, num_tokens, drafts, depth * free, sampled, levels, self.num_nodes
        )


def tree_drafts(
    drafts: DraftTrees, req_ids: Sequence[str], structured: Sequence[bool]
) -> DraftMessage:
    """The drafts in the scheduler's format; waits for the device.

    For requests with ``structured`` output they are candidates, from which a grammar chooses.
    """
    found = DraftMessage(list(req_ids), [], [])
    numbers = torch.stack([drafts.token_ids, drafts.parents, drafts.source]).tolist()
    survivals = drafts.log_survival.exp().tolist()
    for row, (req_id, follows) in enumerate(zip(req_ids, structured, strict=True)):
        survival = [value for value in survivals[row][1:] if value > 0.0]
        tokens, parents, source = (each[row][1 : 1 + len(survival)] for each in numbers)
        if follows:
            if tokens:
                found.candidates[req_id] = Candidates(tokens, parents, survival)
            tokens, survival = [], []
        elif any(source):
            found.proposed_by[req_id] = source
        found.draft_token_ids.append(tokens)
        found.survival.append(survival)
    return found
