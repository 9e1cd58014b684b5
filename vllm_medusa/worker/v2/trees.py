"""What the seams of one runner share: the trees, the requests' options, the step under way."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.positions import write_node_positions
from vllm_medusa.scorer.step import Trees as TreesOf
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree import TreeBatch, TreeTensors
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.v2.requests import RequestOptions
from vllm_medusa.worker.v2.topologies import Topologies


class Trees:
    """Written by one seam and read by the next ones of the same step."""

    def __init__(self, vllm_config: VllmConfig, static: TreeTensors | None, device: torch.device):
        scheduler, options = vllm_config.scheduler_config, EngineOptions.of(vllm_config)
        self.num_nodes = options.tree.num_nodes  # of a request, root included, at most
        self.topologies: Topologies | None = None  # None: one static tree
        if static is None:
            self.topologies = Topologies(
                max(options.tree.max_depth, options.depth),
                self.num_nodes,
                scheduler.max_num_seqs,
                device,
            )
        else:
            self._static = static
            self.static_parents: list[int] = static.parents[1:].tolist()
        self.requests = RequestOptions(
            scheduler.max_num_seqs,
            options.acceptance,
            vllm_config.model_config.max_model_len,
            device,
        )
        # int64 [most tokens of a step]; one place for good: CUDA graphs read it there
        self.buffer = torch.zeros(
            scheduler.max_num_batched_tokens, dtype=torch.int64, device=device
        )
        # parents of the drafts that the scheduler chose for this step, by request
        self.told: Mapping[str, list[int]] = {}
        self.step: TreeStep | None = None  # None: no request has drafts
        self.verdict: Verdict | None = None
        self.log_survival: Tensor | None = None  # float32 [B, K] of the last drafts, if dynamic
        self.states: RequestState | None = None  # vLLM's, of the step
        self.limit: int | None = None  # of the drafter's drafts; None: as of all

    def of(self, slots: Tensor) -> TreesOf:
        """The topologies of the requests in ``slots``, int64 [B]."""
        if self.topologies is None:
            return self._static.batch
        return functools.partial(self.topologies.trees, slots)

    def _with_told(self, of: TreesOf, req_ids: Sequence[str]) -> TreesOf:
        """The same with the trees that the scheduler chose."""
        rows = [row for row, req_id in enumerate(req_ids) if req_id in self.told]
        if not rows:
            return of

        def trees(width: int, counts: Tensor) -> TreeBatch:
            parents = np.full((len(rows), width), -1, dtype=np.int64)
            for place, row in enumerate(rows):
                own = self.told[req_ids[row]]
                parents[place, 1 : 1 + len(own)] = own
            device = counts.device
            index = async_tensor_h2d(np.array(rows), device=device)
            return of(width, counts).with_trees(
                index, async_tensor_h2d(parents, device=device), counts[index]
            )

        return trees

    def begin(self, batch: InputBatch, slot_mappings: Tensor) -> TreeStep | None:
        """Lay out the trees of a batch; ``slot_mappings`` is int64 [KV groups, T]."""
        self.step = self.verdict = None
        if batch.num_draft_tokens:
            self.step = TreeStep.lay_out(
                self._with_told(self.of(batch.idx_mapping), batch.req_ids),
                np.diff(batch.cu_num_logits_np).astype(np.int64),
                batch.cu_num_logits,
                batch.logits_indices,
                batch.input_ids,
            )
            self.step.slot_mappings = dict(enumerate(slot_mappings))
        return self.step

    def positions(self, batch: InputBatch) -> Tensor:
        """Where the tokens stand for RoPE, int64 [T]: vLLM's positions, but nodes by depth."""
        positions = self.buffer[: batch.num_tokens_after_padding]
        positions.copy_(batch.positions)
        step = self.step
        if step is not None:
            base = batch.seq_lens[: step.batch_size] - step.tree.num_nodes
            write_node_positions(
                positions, base, step.tree.depths, step.cu_nodes, len(step.rows), step.root_rows
            )
        return positions

    def end(self) -> Verdict | None:
        """End the step: its verdict. A dummy step that follows may lay out no trees."""
        verdict, self.step, self.verdict = self.verdict, None, None
        return verdict
