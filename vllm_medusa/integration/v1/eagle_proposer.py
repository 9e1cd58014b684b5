"""EAGLE drafters on the V1 runner: vLLM's proposer loads them, `EagleTrees` drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_medusa.integration.drafters.accepted_paths import accepted_paths
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees, PendingTokens, Roots
from vllm_medusa.integration.startup.eagle_options import beam_of, check_captured_layers
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.target import unwrap_adapted
from vllm_medusa.integration.v1.runner import MedusaModelRunner
from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.step import TreeStep


class EagleTreeDrafter(EagleTrees, EagleProposer):
    """vLLM's proposer provides module, weights and cache groups; `EagleTrees` drafts."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.beam = beam_of(TreeSettings.of(vllm_config).tree)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which may share the target's embedding and LM head."""
        super().load_model(target_model)
        unwrap_adapted(self.model)
        self.prepare()

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Run one forward pass; vLLM runs one per draft token."""
        super().dummy_run(num_tokens, *args[:1], **kwargs | {"is_graph_capturing": True})


class EagleModelRunner(MedusaModelRunner):
    """`MedusaModelRunner` whose drafter has a KV cache that is updated with accepted paths."""

    needs_every_token = True

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.drafter = EagleTreeDrafter(vllm_config, device, self)
        self._pending = PendingTokens(self.drafter)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and drafter; check that the target returns the required hidden states."""
        super().load_model(*args, **kwargs)
        if self.use_aux_hidden_state_outputs:
            check_captured_layers(self.get_model(), self.speculative_config)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step, after writing the deferred entries whose slots it may reuse."""
        self._pending.before_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _draft_states(
        self, step: TreeStep | None, verdict: Verdict | None, scheduler_output: Any, *args: Any
    ) -> Roots | None:
        """Process accepted tokens; those of plain steps may be deferred, see `PendingTokens`."""
        sampled_token_ids, _, hidden_states, auxiliary, _, common, *_ = args
        count, table = self.input_batch.num_reqs, common.block_table_tensor
        seq_lens, rows = self.seq_lens[:count], scheduler_output.total_num_scheduled_tokens
        features = auxiliary if self.use_aux_hidden_state_outputs else [hidden_states]
        next_tokens = self.drafter.prepare_next_token_ids_cpu(
            sampled_token_ids,
            self.requests,
            self.input_batch,
            scheduler_output.num_scheduled_tokens,
        )
        drafting = scheduler_output.num_spec_tokens_to_schedule > 0
        if step is None and not drafting and rows == count and self.drafter.enters:
            names = self.input_batch.req_ids
            self._pending.add(names, seq_lens, next_tokens, features, table[:count])
            return None
        self._pending.flush()
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        scheduled, ends = np.diff(starts), seq_lens.numpy().astype(np.int64)
        drafts, path = np.zeros_like(scheduled), None
        if step is not None and verdict is not None:
            drafts, path = step.num_nodes - 1, verdict.path
        computed, ids = ends - scheduled, self.input_ids.gpu
        given = next_tokens.to(torch.int64), features, table[:count], int(ends.max())
        if drafting:
            rows = np.stack([starts[:-1], scheduled - drafts, computed])
            roots = self.drafter.prefill_on_host(rows, path, ids, *given)
            if roots is not None:
                return roots
        deepest = 0 if path is None else int(path.num_accepted.max())
        counts = deepest, starts, scheduled, drafts, torch.from_numpy(computed)
        paths = accepted_paths(self.drafter, verdict, *counts, ids, *given)
        return self.drafter.prefill(paths, drafts=drafting)
