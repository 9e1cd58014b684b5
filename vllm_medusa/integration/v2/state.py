"""The model state: V2's hook for positions, metadata and sampler of a model."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration.target import adapted_heads, name_rows
from vllm_medusa.integration.v2.sampler import TreeSampler

if TYPE_CHECKING:
    from vllm_medusa.integration.v2.speculator import TreeSpeculator


def tree_model_state(vllm_config: VllmConfig, model: nn.Module, speculator: TreeSpeculator) -> type:
    """Return vLLM's state class for ``model``, extended with trees."""
    base = resolve_model_state_cls(vllm_config, model)
    if not issubclass(base, DefaultModelState):
        raise MedusaConfigError(
            f"{type(model).__name__} has its own state class on vLLM's V2 runner "
            f"({base.__name__}), which does not support trees. Omit method='medusa'."
        )
    return type(f"Tree{base.__name__}", (TreeModelState, base), {"speculator": speculator})


class TreeModelState(DefaultModelState):
    """Passes the step's trees to positions, attention, verification and the KV cache."""

    speculator: ClassVar[TreeSpeculator]  # of the runner of this class
    _adapted: list[LogitsProcessorWithLoRA] | None = None  # until there is a KV cache

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Store the request's options in addition to vLLM's own state."""
        super().add_request(req_index, new_req_data)
        if new_req_data.sampling_params is not None:
            self.speculator.trees.requests.add(
                req_index, new_req_data.sampling_params, new_req_data.prompt_len
            )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Check that every layer's attention supports trees."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        drafts = {name for name in layers if getattr(layers[name], "is_draft_layer", False)}
        self.speculator.trees.bind(layers, kv_cache_config, drafts)
        self._adapted = adapted_heads(self.model)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: Any,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[Any]],
        *args: Any,
        ubatch_idx: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Lay out the trees, and build the metadata with them."""
        cu_nodes = input_batch.cu_num_logits_np
        nodes = np.diff(cu_nodes) if input_batch.num_draft_tokens else np.ones(1)
        trees, groups = self.speculator.trees, itertools.chain.from_iterable(attn_groups)
        trees.begin(
            input_batch.idx_mapping,
            input_batch.req_ids,
            nodes.astype(np.int64),
            input_batch.cu_num_logits,
            input_batch.logits_indices,
            input_batch.input_ids,
            dict(enumerate(slot_mappings)),
        )
        given = input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args
        with trees.in_builders(group.get_metadata_builder(ubatch_idx) for group in groups):
            return super().prepare_attn(*given, ubatch_idx=ubatch_idx, **kwargs)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Set node positions by depth; slots are already assigned."""
        inputs = super().prepare_inputs(input_batch, req_states)
        self.speculator.states = req_states
        if self._adapted:
            name_rows(self._adapted, input_batch.logits_indices)
        assert "positions" not in inputs, "models with their own positions are refused"
        positions = self.speculator.positions[: input_batch.num_tokens_after_padding]
        positions.copy_(input_batch.positions)
        step = self.speculator.trees.step
        if step is not None:
            base = input_batch.seq_lens[: step.batch_size] - step.tree.num_nodes
            self.speculator.trees.write_positions(positions, base)
        return {**inputs, "positions": positions}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Make CUDA graphs capture the positions buffer that `prepare_inputs` writes."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return {**inputs, "positions": self.speculator.positions[:num_tokens]}

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Keep vLLM's sampler; replace its rejection sampler."""
        config = self.vllm_config.speculative_config
        self.speculator.sampler = sampler
        return sampler, TreeSampler(
            sampler, config, self.device, self.speculator.trees, self.speculator.positions
        )

    def postprocess_state(
        self, idx_mapping: Tensor, num_sampled: Tensor, num_computed_tokens: Tensor | None = None
    ) -> None:
        """Compact the accepted paths; a chain's drafts would already be in place.

        This is the last access to the cache before the next forward pass, which finds the same
        cache as in plain decoding.
        """
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        self.speculator.trees.compact()
