"""The speculator: loads the heads beside the target and drafts the next trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_medusa.proposer.candidates import IMPOSSIBLE, Proposal
from vllm_medusa.sampler import Verdict
from vllm_medusa.worker.adapters import adapted_heads, adapters_left_out
from vllm_medusa.worker.drafting import MedusaDrafter
from vllm_medusa.worker.drafts import TreeDrafts, survival_of
from vllm_medusa.worker.options import EngineOptions, is_eagle, is_medusa
from vllm_medusa.worker.overrides import override
from vllm_medusa.worker.v2.copies import Copies
from vllm_medusa.worker.v2.state import tree_model_state
from vllm_medusa.worker.v2.trees import Trees


def install() -> None:
    """Have the runner build a `TreeSpeculator` where Medusa is asked for; idempotent."""
    override(model_runner, "init_speculator", _init_speculator)


def _init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: VllmConfig, device: torch.device, states: Any) -> Any:
        if not is_medusa(vllm_config.speculative_config):
            return original(vllm_config, device, states)
        kind = TreeSpeculator
        if is_eagle(vllm_config.speculative_config):
            from vllm_medusa.worker.v2.eagle import EagleTreeSpeculator

            kind = EagleTreeSpeculator
        speculator = kind(vllm_config, device)
        if speculator.copies is not None:
            speculator.copies.keep_texts_on_device(states)
        return speculator

    return init_speculator


class TreeSpeculator(DraftModelSpeculator):
    """Drafts a tree for each request from the hidden state of its last accepted node.

    Of vLLM's speculators only this kind is given the target model. The heads attend to nothing,
    so there are no layers, no KV cache and no CUDA graphs of their own.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.drafter = self.make_drafter()
        self.trees = Trees(vllm_config, self.drafter.tree, device)
        options = EngineOptions.of(vllm_config)
        self._has_drafter = options.heads is not None
        self.copies = Copies(vllm_config, device) if options.lookup else None
        self._drafted_for: list[str] = []
        self._parents: np.ndarray | None = None  # int64 [B, N] of the last drafts, on the host

    def make_drafter(self) -> Any:
        """What drafts, not loaded yet."""
        return MedusaDrafter(self.vllm_config)

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """Load the heads, which vLLM is to keep when it sleeps."""
        self.load_beside(target_model)
        return self.drafter.buffers_for_sleep()

    def load_beside(self, target_model: Any) -> None:
        """Load what drafts; have the target bring our state when the runner asks it for one."""
        self.drafter.load_model(target_model)
        self._target = target_model
        state_cls = tree_model_state(self.vllm_config, target_model, self.trees)
        target_model.get_model_state_cls = lambda: state_cls

    def set_attn(self, *args: Any) -> None:
        """No attention."""
        self.attn_groups: list[Any] = []

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No graphs."""

    def capture(self) -> None:
        """No graphs."""

    def warm_up(self) -> None:
        """Compile what drafting needs."""
        if not self._has_drafter:
            return
        hidden_size, device = self.vllm_config.model_config.get_hidden_size(), self.device
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        for batch in (1, 16):  # strides of logits that are multiples of 16, or are not
            hidden = torch.zeros(batch, hidden_size, dtype=self.dtype, device=device)
            roots = slot.expand(batch)
            if self.trees.topologies is None:
                self.drafter.propose(hidden, roots)
            else:
                self.drafter.grow(hidden, roots, self.trees.num_nodes, roots)

    def drafts_from(
        self,
        batch: InputBatch,
        verdict: Verdict | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        next_tokens: Tensor,
        drafts: bool,
        dummy_run: bool,
    ) -> Any:
        """What the drafter goes by, a row for each request: the hidden state [B, H].

        Args:
            batch: of B requests.
            verdict: of the step; None if it had no drafts.
            last_hidden_states: [T, H], of the target.
            aux_hidden_states: [T, H] each; None unless the drafter asks for them.
            next_tokens: int64 [B], the token behind what the step made sure of.
            drafts: Whether it is to draft now.
            dummy_run: Nothing of it is to be kept.

        """
        last_rows = batch.cu_num_logits[: batch.num_reqs].to(torch.int64)
        if verdict is not None:
            last_rows = last_rows + verdict.path.last_node
        return last_hidden_states[batch.logits_indices[last_rows]]

    def useful_depth(self, depth: Tensor, num_tokens: Tensor, dummy_run: bool) -> Tensor:
        """How deep a node may be, int64 [B], if by a request's options it is ``depth``."""
        return depth

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

        A chain would go on from row ``query_end - 1 - num_rejected`` of each request. The runner
        keeps the first ``num_speculative_tokens`` drafts; if that is 0, no head runs.
        """
        if is_profile:
            self._claim_memory(last_hidden_states)
        trees, batch, slots = self.trees, input_batch.num_reqs, input_batch.idx_mapping
        verdict = trees.end()
        trees.log_survival = self._parents = None
        root = last_sampled[slots].view(batch).to(torch.int64)
        prompt = next_prefill_tokens.view(-1, self.max_num_reqs)[0][slots]
        limit = num_speculative_tokens
        own = limit if trees.limit is None else trees.limit
        states = self.drafts_from(
            input_batch,
            verdict,
            last_hidden_states,
            aux_hidden_states,
            torch.where(num_sampled > 0, root, prompt),
            drafts=limit != 0 and own != 0,
            dummy_run=dummy_run,
        )
        if num_speculative_tokens == 0:
            return self.draft_tokens[:batch]
        if trees.topologies is None:
            return self.drafter.propose(states, root)
        num_tokens = input_batch.seq_lens[:batch] - num_rejected + 1
        depth = trees.requests.useful_depth(input_batch.idx_mapping_np, num_tokens)
        depth = depth.masked_fill(num_sampled == 0, 0)  # a prefill that isn't finished
        depth = self.useful_depth(depth, num_tokens, dummy_run)
        proposal = self._grown(states, root, depth, own)
        if self.copies is not None and trees.states is not None and not dummy_run:
            proposal = self.copies.join(
                proposal, input_batch, trees, num_tokens, num_sampled, depth, own
            )
        if not dummy_run:
            trees.topologies.keep(input_batch.idx_mapping, proposal.parents)
        # vLLM copies the drafts to the host if a grammar is there to look at them
        if input_batch.has_structured_output_reqs:
            self._parents = async_copy_to_np(proposal.parents)
        trees.log_survival = proposal.log_survival[:, 1:][:, :limit]
        self._drafted_for = input_batch.req_ids
        tokens = proposal.token_ids[:, 1:]
        return torch.nn.functional.pad(tokens, (0, self.num_speculative_steps - tokens.shape[1]))

    def _grown(self, states: Any, root: Tensor, depth: Tensor, limit: int | None) -> Proposal:
        """What the drafter drafts; nothing, if there is none or it is to rest."""
        if self._has_drafter and limit != 0:
            found: Proposal = self.drafter.grow(states, root, self.trees.num_nodes, depth, limit)
            return found
        tokens = root.new_zeros((len(root), self.trees.num_nodes))
        parents, survival = tokens.clone(), torch.full_like(tokens, IMPOSSIBLE, dtype=torch.float32)
        parents[:, 0], survival[:, 0] = -1, 0.0
        return Proposal(tokens, parents, survival)

    def worth(self, drafts: DraftTokenIds) -> TreeDrafts:
        """The last drafts with what they are worth, if trees are dynamic; waits for the device."""
        if self.trees.topologies is None:
            return TreeDrafts(drafts.req_ids, drafts.draft_token_ids)
        last = self.trees.log_survival
        survival = [[] for _ in drafts.req_ids] if last is None else survival_of(last.cpu().numpy())
        found = TreeDrafts(drafts.req_ids, drafts.draft_token_ids, survival)
        if self.copies is not None and last is not None:
            self.copies.tell(found)
        return found

    def parents(self, place: int, num_drafts: int) -> list[int]:
        """The parent of each draft of a request, by its place in the last batch drafted for."""
        if self.trees.topologies is None:
            return self.trees.static_parents[:num_drafts]
        if self._parents is None:
            return []
        found: list[int] = self._parents[place, 1 : 1 + num_drafts].tolist()
        return found

    def survival(self) -> tuple[list[str], Any] | None:
        """Whom the last drafts were for and their log-survivals, on their way to the host.

        They are there with all that the device is asked for later.
        """
        last = self.trees.log_survival
        return None if last is None else (self._drafted_for, async_copy_to_np(last))

    def _claim_memory(self, hidden_states: Tensor) -> None:
        """Once hold the logits of as many nodes as a step can have.

        vLLM's memory profiling samples one row a request; trees need one for each node, and it is
        start-up that has to find out if they don't fit.
        """
        rows = min(self.max_num_reqs * self.trees.num_nodes, len(hidden_states))
        with adapters_left_out(adapted_heads(self._target)):
            logits = self._target.compute_logits(hidden_states[:rows])
        part = logits[: get_max_chunk_logits(logits.shape[-1])]  # verified at a time, in fp32
        part.to(torch.float32, copy=True).softmax(-1)
