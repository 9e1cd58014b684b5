"""The V1 model runner with trees: wiring only.

A step, in vLLM's order: `_prepare_inputs` (the nodes' positions), `_build_attention_metadata` (the
tree's part of it), the forward pass, `_sample` (verify, then compact the KV cache),
`propose_draft_token_ids` (the next trees).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.positions import write_node_positions
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.worker.checks import check_layers
from vllm_medusa.worker.cpu_attention import TreeMetadataBuilder, compact_group
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.requests import follows_grammar
from vllm_medusa.worker.v1.requests import TypicalRequests
from vllm_medusa.worker.v1.verification import TreeVerifier
from vllm_medusa.worker.weights import heads_left_out


class MedusaModelRunner(CPUModelRunner):
    """vLLM's CPU runner, verifying trees instead of chains."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self._options = EngineOptions.of(vllm_config)
        self._verifier = TreeVerifier(self.sampler)
        self._step: TreeStep | None = None
        self._verdict: Verdict | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, then the heads (vLLM does both); heads in its checkpoint are no part."""
        with heads_left_out():
            super().load_model(*args, **kwargs)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Make sure that every layer's attention is the one with trees."""
        super().initialize_kv_cache(*args, **kwargs)
        check_layers(self.compilation_config.static_forward_context, self.kv_cache_config)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        logits_indices, spec_metadata, _ = prepared
        num_nodes = np.asarray(spec_metadata.num_draft_tokens, dtype=np.int64) + 1
        step = TreeStep.build(self.drafter.tree, num_nodes, logits_indices, self.input_ids.gpu)
        if step.has_trees:  # slots stay where vLLM put them; RoPE goes by depth
            base = self.seq_lens[: step.batch_size] - step.tree.num_nodes
            write_node_positions(
                self.positions,
                base,
                step.tree.depths,
                step.cu_nodes,
                len(step.rows),
                step.root_rows,
            )
        self._step = step
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        slot_mappings = kwargs.get("slot_mappings")
        if step is None or not step.has_trees or slot_mappings is None:
            return super()._build_attention_metadata(*args, **kwargs)
        step.slot_mappings = slot_mappings
        builders = [group.get_metadata_builder() for groups in self.attn_groups for group in groups]
        for builder in builders:
            assert isinstance(builder, TreeMetadataBuilder)
            builder.step = step
        try:
            return super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.step = None

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        step = self._step
        assert step is not None and logits is not None
        verdict, output = self._verifier(
            logits,
            step,
            self.input_batch.sampling_metadata,
            self._typical_requests(),
            self._discarded(),
        )
        if step.has_trees:
            self._compact(step, verdict)
        self._verdict = verdict
        return output

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft from the last accepted node of every request that goes on and may be drafted for.

        Requests that follow a grammar may not be, see `follows_grammar`.
        """
        step, verdict = self._step, self._verdict
        self._step = self._verdict = None
        assert step is not None and verdict is not None
        rows = step.cu_nodes[:-1] + verdict.path.last_node
        drafts = self.drafter.propose(sample_hidden_states[rows]).tolist()
        limit = scheduler_output.num_spec_tokens_to_schedule
        return [
            draft[:limit] if tokens and not follows_grammar(self._params(req_id)) else []
            for draft, tokens, req_id in zip(
                drafts, sampled_token_ids, self.input_batch.req_ids, strict=True
            )
        ]

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """The heads take no positions; the scheduler cuts drafts at max_model_len by request."""
        return True

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators of discarded requests: vLLM rewinds them, which CPUs can not.

        There is nothing to rewind: they drew nothing (`TreeVerifier`).
        """
        generators = self.input_batch.generators
        hidden = {
            index: generators.pop(index) for index in self._discarded() if index in generators
        }
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    def _compact(self, step: TreeStep, verdict: Verdict) -> None:
        """Move the accepted path to contiguous slots, in every KV cache group and layer."""
        path, layers = verdict.path, self.compilation_config.static_forward_context
        for gid, group in enumerate(self.kv_cache_config.kv_cache_groups):
            compact_group(layers, group.layer_names, step.slots(gid), path.nodes, path.num_accepted)

    def _typical_requests(self) -> TypicalRequests | None:
        params = [self._params(req_id) for req_id in self.input_batch.req_ids]
        return TypicalRequests.of(params, self._options.acceptance, self.device)

    def _discarded(self) -> list[int]:
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return np.nonzero(mask)[0].tolist()

    def _params(self, req_id: str) -> SamplingParams | None:
        return self.requests[req_id].sampling_params
