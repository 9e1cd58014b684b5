"""EAGLE drafters on the V2 runner: `EagleTrees` drafts, from what the runner has on its device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.sampler import Verdict
from vllm_medusa.worker.eagle import beam_of, check_captured_layers, scratch_of
from vllm_medusa.worker.eagle_trees import NO_SLOT, AcceptedPaths, EagleTrees, Roots, Waiting
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.v2.speculator import TreeSpeculator


class EagleTreeDrafter(EagleTrees):
    """vLLM's module with its weights; the cache groups come with `bind`."""

    tree = None  # none that is static

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.options = EngineOptions.of(vllm_config)
        self.method = str(vllm_config.speculative_config.method)  # type: ignore[union-attr]
        self.beam = beam_of(self.options.tree)
        self.block_size = vllm_config.model_config.max_model_len  # till there is a cache
        self._groups: list[Any] = []

    @property
    def groups(self) -> list[Any]:
        """Attention groups of its layers; none before `bind`."""
        return self._groups

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, which may share the target's embedding and LM head."""
        config = self.vllm_config.speculative_config
        if self.method == "eagle3":
            check_captured_layers(target_model, config)
        self.model = load_eagle_model(target_model, self.vllm_config)
        self.read_vocabulary()

    def bind(self, groups: list[Any], block_size: int) -> None:
        """Take the attention groups of its layers, all of one KV cache group."""
        self._groups, self.block_size = groups, block_size


class EagleTreeSpeculator(TreeSpeculator):
    """A speculator whose drafter has a KV cache: in every step it takes in what was accepted."""

    drafter: EagleTreeDrafter

    def make_drafter(self) -> EagleTreeDrafter:
        """The drafter, not loaded yet."""
        drafter = EagleTreeDrafter(self.vllm_config)
        self._waiting = Waiting(drafter)
        return drafter

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the drafter; its layers are vLLM's, as is what becomes of them in its sleep."""
        self.load_beside(target_model)
        return self.drafter.model

    def set_attn(self, *args: Any) -> None:
        """Find the drafter's layers in vLLM's KV cache groups.

        Raises:
            MedusaConfigError: They are in more than one.

        """
        DraftModelSpeculator.set_attn(self, *args)
        found = [index for index, groups in enumerate(self.attn_groups) if groups]
        if len(found) != 1:
            raise MedusaConfigError(
                f"The drafter's layers are in {len(found)} KV cache groups; trees need them in "
                'one. Leave "tree" out.'
            )
        (self._group,) = found
        block_size = self.block_tables.block_sizes[self._group]
        self.drafter.bind(self.attn_groups[self._group], block_size)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what levels of trees need: into how many parts keys go follows from lengths.

        Nobody's entries are written, and no context is read.
        """
        nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        states = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        table = self.block_tables.input_block_tables[self._group][:1]
        longest = self.max_model_len
        while longest:
            roots = Roots(states, states, nothing, longest, table)
            self.drafter.grow(roots, nothing, self.trees.num_nodes, nothing)
            longest //= 2

    def drafts_from(
        self,
        batch: InputBatch,
        verdict: Verdict | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        next_tokens: Tensor,
        drafts: bool,
        dummy_run: bool,
    ) -> Roots | None:
        """Take in what was accepted; what plain steps gave waits for those that draft."""
        shown = [last_hidden_states]
        if self.method == "eagle3":
            assert aux_hidden_states is not None
            shown = aux_hidden_states
        count = batch.num_reqs
        table = torch.zeros(count, 1, dtype=torch.int32, device=self.device)
        if self.drafter.groups:
            table = self.block_tables.input_block_tables[self._group][:count]
        paths = self._accepted(batch, verdict, shown, next_tokens, table)
        if dummy_run:
            paths.slots.fill_(NO_SLOT)
            return self.drafter.prefill(paths)
        plain = verdict is None and len(paths.positions) == count
        return self._waiting.roots(batch.req_ids, paths, plain=plain, drafts=drafts)

    def useful_depth(self, depth: Tensor, num_tokens: Tensor, dummy_run: bool) -> Tensor:
        """As for heads; and the branches need room before the end of what the model takes."""
        room = num_tokens - 1 + scratch_of(self.drafter.beam) <= self.max_model_len
        return depth.masked_fill(~room, 0) if not dummy_run else torch.zeros_like(depth)

    def _accepted(
        self,
        batch: InputBatch,
        verdict: Verdict | None,
        shown: list[Tensor],
        next_tokens: Tensor,
        table: Tensor,
    ) -> AcceptedPaths:
        """The accepted paths, each with rows for the deepest one that there can be.

        A request's rows are those up to its root, then a node of each depth. Which node, and
        whether it was accepted, is on the device.
        """
        count, device = batch.num_reqs, self.device
        drafts = np.diff(batch.cu_num_logits_np[: count + 1]) - 1
        before = batch.num_scheduled_tokens - drafts  # rows up to the root
        deepest = 0 if verdict is None else verdict.path.nodes.shape[1] - 1
        counts = (before + np.minimum(drafts, deepest)).astype(np.int64)
        starts = np.concatenate(([0], counts.cumsum()))
        owners = np.repeat(np.arange(count), counts)
        places = np.arange(starts[-1]) - starts[owners]
        depths = np.maximum(places - before[owners] + 1, 0)
        rows = batch.query_start_loc_np[owners] + np.minimum(places, before[owners] - 1)
        owner, place, depth, row = async_tensor_h2d(
            np.stack([owners, places, depths, rows]), device=device
        )
        first, root, size, scheduled = async_tensor_h2d(
            np.stack([starts[:-1], before - 1, counts, batch.num_scheduled_tokens]), device=device
        )
        base = batch.seq_lens[:count] - scheduled  # int64 [B], what was computed before
        last = root
        positions = base[owner] + place
        slots = self.drafter.slots(table, owner, positions)
        if verdict is not None:
            path = verdict.path
            last = root + path.num_accepted
            row = row + path.nodes[owner, depth]
            slots = torch.where(depth <= path.num_accepted[owner], slots, NO_SLOT)
        next_ids = batch.input_ids[row].roll(-1).to(torch.int64)
        longest = int(batch.seq_lens_cpu_upper_bound.numpy()[:count].max())
        return AcceptedPaths(
            starts=async_tensor_h2d(starts.astype(np.int32), device=device),
            starts_cpu=torch.from_numpy(starts.astype(np.int32)),
            most_rows=int(counts.max()),
            last=first + last,
            next_ids=next_ids.index_copy(0, first + last, next_tokens),
            positions=positions,
            slots=slots,
            features=torch.cat([state[row] for state in shown], -1),
            lengths=base + size,
            longest=longest,
            block_table=table,
            ends=base + last + 1,
        )
