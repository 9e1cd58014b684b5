"""The speculator: loads the heads and drafts the next trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_medusa.integration.drafters.draft_messages import DraftMessage
from vllm_medusa.integration.drafters.medusa_drafter import MedusaDrafter
from vllm_medusa.integration.overrides import override
from vllm_medusa.integration.request_trees import RequestTrees, tree_drafts
from vllm_medusa.integration.scheduling.grammar import Candidates
from vllm_medusa.integration.startup.options import has_trees, is_eagle
from vllm_medusa.integration.target import adapted_heads, adapters_left_out
from vllm_medusa.integration.v2.kernel import HashedNoise, persistent_draws
from vllm_medusa.integration.v2.state import tree_model_state
from vllm_medusa.lookup.search import continuations, join
from vllm_medusa.sampler import Verdict
from vllm_medusa.tree.draft_trees import DraftTrees


def install() -> None:
    """Make the runner build a `TreeSpeculator` for Medusa; idempotent."""
    override(model_runner, "init_speculator", _init_speculator)


def _init_speculator(
    original: Callable[..., Any], vllm_config: VllmConfig, device: torch.device, states: Any
) -> Any:
    if not has_trees(vllm_config.speculative_config):
        return original(vllm_config, device, states)
    kind = TreeSpeculator
    if is_eagle(vllm_config.speculative_config):
        from vllm_medusa.integration.v2.eagle_drafter import EagleTreeSpeculator

        kind = EagleTreeSpeculator
    speculator = kind(vllm_config, device)
    if speculator.trees.lookup is not None:
        # vLLM's table of token ids is in host memory by default, but lookup searches
        # all of it in each step. vLLM does the same for its own n-grams.
        shape = states.max_num_reqs, states.max_model_len
        states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=states.device)
    return speculator


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree for each request from the hidden state of its last accepted node.

    The base class is `DraftModelSpeculator` because vLLM passes the target model to no other kind.
    Heads have no attention, so there are no layers, KV cache or CUDA graphs for them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.drafter = self.make_drafter()
        self.trees = RequestTrees(vllm_config, self.drafter, device)
        self.states: RequestState | None = None  # vLLM's, of the step
        self.sampler: Sampler | None = None  # vLLM's
        self.limit: int | None = None  # max drafts from the drafter; None: no separate limit
        # int64 [max tokens of a step]; a fixed address, because CUDA graphs read it
        self.positions = torch.zeros(
            vllm_config.scheduler_config.max_num_batched_tokens, dtype=torch.int64, device=device
        )
        self._drafted_for: list[str] = []
        self._drafts: DraftTrees | None = None  # the last drafts
        self._parents: np.ndarray | None = None  # int64 [B, N] their parents, on the host

    def make_drafter(self) -> Any:
        """Create the drafter without loading it."""
        return MedusaDrafter(self.vllm_config)

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the heads, which vLLM keeps in sleep mode."""
        self.load_drafter(target_model)
        return self.drafter.buffers_for_sleep()

    def load_drafter(self, target_model: Any) -> None:
        """Load the drafter; make the target return our model state to the runner."""
        self.drafter.load_model(target_model)
        self._target = target_model
        state_cls = tree_model_state(self.vllm_config, target_model, self)
        target_model.get_model_state_cls = lambda: state_cls

    def set_attn(self, *args: Any) -> None:
        """Nothing to do: there is no attention."""
        self.attn_groups: list[Any] = []

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to do: there are no graphs."""

    def capture(self) -> None:
        """Nothing to do: there are no graphs."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the drafting kernels."""
        if self.trees.options.heads is None:
            return
        hidden_size, device = self.vllm_config.model_config.get_hidden_size(), self.device
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        for batch in (1, 16):  # logits strides that are, or are not, multiples of 16
            hidden = torch.zeros(batch, hidden_size, dtype=self.dtype, device=device)
            roots = slot.expand(batch)
            for stream in (None, self._dummy_stream(roots)):
                self.drafter.draft(hidden, roots, self.trees.num_nodes, roots, stream=stream)

    def _dummy_stream(self, slots: Tensor) -> HashedNoise:
        """Arbitrary noise, to compile its kernel; ``slots`` is int64 [B]."""
        return HashedNoise(slots, slots, slots, slots.to(torch.float32) + 1)

    def _stream(
        self, host_slots: np.ndarray, slots: Tensor, num_tokens: Tensor
    ) -> HashedNoise | None:
        """The noise of the next tokens of B requests; None: no request uses it.

        ``num_tokens`` (integer [B]) counts their tokens so far.
        """
        if self.sampler is None or not self.trees.options.shared_noise:
            return None
        host_temperature = persistent_draws(self.sampler, self.trees.requests, host_slots)
        if not host_temperature.any():
            return None
        temperature = async_tensor_h2d(host_temperature, device=self.device)
        seeds = self.sampler.sampling_states.seeds.gpu
        return HashedNoise(seeds, slots, num_tokens - 1, temperature)

    def warm_up_lookup(self, texts: Tensor) -> None:
        """Compile the lookup kernels; ``texts`` is int32 [slots, max tokens of a text]."""
        one = torch.ones(1, dtype=torch.int64, device=texts.device)
        nodes = self.trees.num_nodes
        _, found, _ = continuations(texts, one - 1, one, nodes - 1)
        levels = self.trees.options.tree.max_depth
        join(DraftTrees.roots(1, nodes, texts.device), found, found.to(torch.float32), levels)

    def before_step(self, scheduled: SchedulerOutput) -> None:
        """Nothing to do: no step waits for the next one."""

    def draft_states(
        self,
        batch: InputBatch,  # of B requests
        verdict: Verdict | None,  # of the step; None without drafts
        last_hidden_states: Tensor,  # [T, H], of the target
        aux_hidden_states: list[Tensor] | None,  # [T, H] each; None unless the drafter needs them
        next_tokens: Tensor,  # int64 [B], the token that follows the accepted ones
        drafts: bool,  # whether drafts are needed
        dummy_run: bool,  # results are discarded
    ) -> Any:
        """The drafter's input, see `drafter.Drafter`: hidden states [B, H]."""
        last_rows = batch.cu_num_logits[: batch.num_reqs].to(torch.int64)
        if verdict is not None:
            last_rows = last_rows + verdict.path.last_node
        return last_hidden_states[batch.logits_indices[last_rows]]

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        *args: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft from ``last_hidden_states`` [T, H]: int64 [B, num_speculative_steps].

        A chain would continue from row ``query_end - 1 - num_rejected`` of each request. The runner
        keeps the first ``num_speculative_tokens`` drafts; if that is 0, no head runs.
        """
        if is_profile:
            self._claim_memory(last_hidden_states)
        trees, batch, slots = self.trees, input_batch.num_reqs, input_batch.idx_mapping
        verdict = trees.end()
        self._drafts = self._parents = None
        root = last_sampled[slots].view(batch).to(torch.int64)
        prompt = next_prefill_tokens.view(-1, self.max_num_reqs)[0][slots]
        limit = num_speculative_tokens
        drafter_limit = limit if self.limit is None else self.limit
        states = self.draft_states(
            input_batch,
            verdict,
            last_hidden_states,
            aux_hidden_states,
            torch.where(num_sampled > 0, root, prompt),
            drafts=limit != 0 and drafter_limit != 0,
            dummy_run=dummy_run,
        )
        if limit == 0:
            return self.draft_tokens[:batch]
        host_slots, nodes = input_batch.idx_mapping_np, trees.num_nodes
        num_tokens = input_batch.seq_lens[:batch] - num_rejected + 1
        depth = torch.zeros_like(root)
        if not dummy_run:
            depth = trees.useful_depth(host_slots, num_tokens, num_sampled)
        if trees.options.heads is not None and drafter_limit != 0:
            stream = None if dummy_run else self._stream(host_slots, slots, num_tokens)
            drafts = self.drafter.draft(states, root, nodes, depth, drafter_limit, None, stream)
        else:
            drafts = DraftTrees.roots(batch, nodes, self.device)
        if not dummy_run:
            if trees.lookup is not None and self.states is not None:
                longest = int(input_batch.seq_lens_cpu_upper_bound.numpy()[:batch].max()) + 1
                texts, where = self.states.all_token_ids.gpu[:, :longest], slots.to(torch.int64)
                drafts = drafts if drafter_limit is None else drafts.limited(drafter_limit)
                may_copy = async_tensor_h2d(trees.requests.may_copy(host_slots), device=self.device)
                counts = num_tokens.to(torch.int64), num_sampled.to(torch.int64)
                drafts = trees.add_copies(drafts, where, texts, where, *counts, depth, *may_copy)
            trees.keep(slots, drafts.parents)
        # vLLM copies the drafts to the host if some request has a grammar
        if input_batch.has_structured_output_reqs:
            self._parents = async_copy_to_np(drafts.parents)
        self._drafts, self._drafted_for = drafts, input_batch.req_ids
        if limit is not None:
            self._drafts = drafts.prefix(1 + limit)
        tokens = drafts.token_ids[:, 1:]
        return torch.nn.functional.pad(tokens, (0, self.num_speculative_steps - tokens.shape[1]))

    def last_drafts(self, drafts: DraftTokenIds, structured: Sequence[bool]) -> DraftMessage:
        """The last drafts for the scheduler; waits for the device unless scheduling is ahead.

        ``drafts`` are vLLM's: token ids if some request has a grammar, else placeholders. The
        drafts of ``structured`` requests are candidates.
        """
        ahead = self.vllm_config.scheduler_config.async_scheduling
        if not ahead and self._drafts is not None:
            found = tree_drafts(self._drafts, drafts.req_ids, structured)
            for req_id, candidates in found.candidates.items():
                given = drafts.draft_token_ids[drafts.req_ids.index(req_id)]
                if given and min(given) >= 0:
                    candidates.token_ids = given[: len(candidates.token_ids)]
            return found
        found = DraftMessage(drafts.req_ids, drafts.draft_token_ids)
        for place, (req_id, follows) in enumerate(zip(drafts.req_ids, structured, strict=True)):
            if follows:
                tokens, found.draft_token_ids[place] = found.draft_token_ids[place], []
                if self._parents is not None and tokens and min(tokens) >= 0:
                    parents = self._parents[place, 1 : 1 + len(tokens)].tolist()
                    found.candidates[req_id] = Candidates(tokens, parents)
        if not ahead:
            found.survival = [[] for _ in drafts.req_ids]
        return found

    def sent_with_output(self) -> dict[str, Any]:
        """What the scheduler needs of the last drafts, by attribute; copied to the host async.

        ``tree_survival``: the requests, and their log-survivals [B, K]; with lookup
        ``tree_copies``: tokens and sources, int64 [B, K]. They arrive before the results of later
        work on the device.
        """
        drafts = self._drafts
        if drafts is None or self.trees.static is not None:
            return {}
        sent: dict[str, Any] = {}
        sent["tree_survival"] = self._drafted_for, async_copy_to_np(drafts.log_survival[:, 1:])
        if self.trees.lookup is not None:
            both = async_copy_to_np(drafts.token_ids), async_copy_to_np(drafts.source)
            sent["tree_copies"] = both[0][:, 1:], both[1][:, 1:]
        return sent

    def _claim_memory(self, hidden_states: Tensor) -> None:
        """Allocate the logits of a step with the max number of nodes once.

        vLLM's memory profiling samples one row per request; trees need one per node. If they do not
        fit, the error is raised at start-up.
        """
        rows = min(self.max_num_reqs * self.trees.num_nodes, len(hidden_states))
        with adapters_left_out(adapted_heads(self._target)):
            logits = self._target.compute_logits(hidden_states[:rows])
        part = logits[: get_max_chunk_logits(logits.shape[-1])]  # verified at once, in fp32
        part.to(torch.float32, copy=True).softmax(-1)
