"""The V1 runner whose trees an EAGLE drafter grows: after each verdict it takes in the paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.worker.eagle import check_captured_layers, scratch_of
from vllm_medusa.worker.eagle_trees import Roots, Waiting
from vllm_medusa.worker.v1.eagle import EagleTreeDrafter, paths_of
from vllm_medusa.worker.v1.runner import MedusaModelRunner


class EagleModelRunner(MedusaModelRunner):
    """`MedusaModelRunner` with a drafter that has a KV cache."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.drafter = EagleTreeDrafter(vllm_config, device, self)
        self._waiting = Waiting(self.drafter)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and drafter, and have the target show the hidden states it was trained on."""
        super().load_model(*args, **kwargs)
        if self.use_aux_hidden_state_outputs:
            check_captured_layers(self.get_model(), self.speculative_config)

    def _drafts_from(
        self,
        step: TreeStep | None,
        verdict: Verdict | None,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sample_hidden_states: Tensor,
        *states: Any,
    ) -> Roots | None:
        """Take in what was accepted; what plain steps gave waits for those that draft."""
        hidden_states, auxiliary, _, common = states[:4]
        rows, counts, ends = self._accepted_rows(step, verdict, common)
        next_ids = self.input_ids.gpu[rows].roll(-1)
        next_ids[counts.cumsum(0) - 1] = self.drafter.prepare_next_token_ids_cpu(
            sampled_token_ids,
            self.requests,
            self.input_batch,
            scheduler_output.num_scheduled_tokens,
        )
        shown = auxiliary if self.use_aux_hidden_state_outputs else [hidden_states]
        paths = paths_of(
            self.drafter,
            counts=counts,
            next_ids=next_ids,
            positions=self.positions[rows],
            features=torch.cat([state[rows] for state in shown], -1),
            block_table=common.block_table_tensor[: len(counts)],
            ends=ends,
        )
        return self._waiting.roots(
            self.input_batch.req_ids,
            paths,
            plain=step is None and len(rows) == len(counts),
            drafts=scheduler_output.num_spec_tokens_to_schedule > 0,
        )

    def _accepted_rows(
        self, step: TreeStep | None, verdict: Verdict | None, common: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The step's rows that were accepted, of each request how many, and where they end.

        int64 [T], [B] and [B].
        """
        num_reqs = self.input_batch.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].to(torch.int64)
        ends = self.seq_lens[:num_reqs].to(torch.int64)
        if step is None or verdict is None:
            return torch.arange(int(starts[-1])), starts.diff(), ends
        path, roots = verdict.path, step.root_rows
        before = roots - starts[:-1]  # rows of a prefill, less its last
        counts = before + 1 + path.num_accepted
        owners = torch.repeat_interleave(torch.arange(num_reqs), counts)
        place = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        depth = place - before[owners]
        nodes = path.nodes[owners, depth.clamp_min(0)]
        rows = torch.where(depth > 0, roots[owners] + nodes, starts[owners] + place)
        return rows, counts, ends - torch.from_numpy(step.num_nodes) + 1 + path.num_accepted

    def _targets_layers(self, names: list[str]) -> list[str]:
        own = self.drafter.layer_names
        return [name for name in names if name not in own]

    def _useful_depth(self, req_id: str) -> int:
        """As for heads; and the branches need room before the end of what the model takes."""
        request = self.requests[req_id]
        length = request.num_prompt_tokens + len(request.output_token_ids)
        if length - 1 + scratch_of(self.drafter.beam) > self.max_model_len:
            return 0
        return super()._useful_depth(req_id)
