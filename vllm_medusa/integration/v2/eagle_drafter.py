"""EAGLE drafters on the V2 runner: `EagleTrees` drafts from the runner's device state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration.drafters.accepted_paths import NO_SLOT, accepted_paths
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees, PendingTokens, Roots
from vllm_medusa.integration.startup.eagle_options import (
    beam_of,
    check_captured_layers,
    reads_layers,
)
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.v2.speculator import TreeSpeculator
from vllm_medusa.sampler import Verdict


class EagleTreeDrafter(EagleTrees):
    """vLLM's module with its weights; the speculator sets the cache groups."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.method = str(vllm_config.speculative_config.method)  # type: ignore[union-attr]
        self.reads_layers = reads_layers(vllm_config.speculative_config)
        self.beam = beam_of(TreeSettings.of(vllm_config).tree)
        self.draft_attn_groups: list[Any] = []  # until there is a cache
        self.block_size = vllm_config.model_config.max_model_len  # likewise

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which may share the target's embedding and LM head."""
        config = self.vllm_config.speculative_config
        if self.reads_layers:
            check_captured_layers(target_model, config)
        self.model = load_eagle_model(target_model, self.vllm_config)
        self.prepare()


class EagleTreeSpeculator(TreeSpeculator):
    """A speculator whose drafter has a KV cache that is updated with accepted paths."""

    drafter: EagleTreeDrafter

    def make_drafter(self) -> EagleTreeDrafter:
        """Create the drafter without loading it."""
        drafter = EagleTreeDrafter(self.vllm_config)
        self._pending = PendingTokens(drafter)
        return drafter

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the drafter; vLLM manages its layers, also in sleep mode."""
        self.load_drafter(target_model)
        return self.drafter.model

    def set_attn(self, *args: Any) -> None:
        """Find the drafter's layers in vLLM's KV cache groups.

        Raises MedusaConfigError: they are not in exactly one group.
        """
        DraftModelSpeculator.set_attn(self, *args)
        found = [index for index, groups in enumerate(self.attn_groups) if groups]
        if len(found) != 1:
            raise MedusaConfigError(
                f"The drafter's layers are in {len(found)} KV cache groups; trees need them in "
                'one. Omit "tree".'
            )
        (self._group,) = found
        self.drafter.draft_attn_groups = self.attn_groups[self._group]
        self.drafter.block_size = self.block_tables.block_sizes[self._group]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run all levels once; no request's entries are written, and no context is read."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        states = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        table = self.block_tables.input_block_tables[self._group][:1]
        roots = Roots(states, states, nothing, self.max_model_len, table)
        for stream in (None, self._dummy_stream(nothing)):
            self.drafter.draft(roots, nothing, self.trees.num_nodes, nothing, stream=stream)

    def before_step(self, scheduled: SchedulerOutput) -> None:
        """Write the deferred entries whose slots the step may reuse."""
        self._pending.before_step(scheduled)

    def draft_states(
        self,
        batch: InputBatch,
        verdict: Verdict | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        next_tokens: Tensor,
        drafts: bool,
        dummy_run: bool,
    ) -> Roots | None:
        """Process accepted tokens; those of plain steps may be deferred, see `PendingTokens`."""
        features = [last_hidden_states]
        if self.drafter.reads_layers:
            assert aux_hidden_states is not None
            features = aux_hidden_states
        count = batch.num_reqs
        if self.drafter.draft_attn_groups:
            table = self.block_tables.input_block_tables[self._group][:count]
        else:  # no cache yet
            table = torch.zeros(count, 1, dtype=torch.int32, device=self.device)
        seq_lens, plain = batch.seq_lens[:count], verdict is None and batch.num_tokens == count
        if plain and not drafts and not dummy_run and self.drafter.enters:
            self._pending.add(batch.req_ids, seq_lens, next_tokens, features, table)
            return None
        self._pending.flush()
        paths = accepted_paths(
            self.drafter,
            verdict,
            0 if verdict is None else verdict.path.nodes.shape[1] - 1,
            batch.query_start_loc_np,
            batch.num_scheduled_tokens,
            np.diff(batch.cu_num_logits_np[: count + 1]) - 1,
            seq_lens.to(torch.int64) - batch.query_start_loc[: count + 1].diff(),
            batch.input_ids,
            next_tokens,
            features,
            table,
            int(batch.seq_lens_cpu_upper_bound.numpy()[:count].max()),
        )
        if dummy_run:
            paths.common.slot_mapping.fill_(NO_SLOT)
        return self.drafter.prefill(paths, drafts=drafts or dummy_run)
