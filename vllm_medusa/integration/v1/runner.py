"""The V1 model runner with trees: wiring only.

A step, in vLLM's order: `_prepare_inputs` (the nodes' positions), `_build_attention_metadata` (the
trees' part of it), the forward pass, `_sample` (verify, then compact the KV cache),
`take_draft_token_ids` (the next trees). vLLM drafts before a step's tokens are sent; here they do
not wait for drafting, nor for an EAGLE drafter's part of a prefill.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_medusa.integration.drafters.draft_messages import DraftMessage, skips_lookup, tree_parents
from vllm_medusa.integration.request_trees import RequestTrees, tree_drafts
from vllm_medusa.integration.requests import CANDIDATES, follows_grammar
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.target import heads_left_out
from vllm_medusa.integration.v1.sampler import GuidedSampler, draws_splitmix
from vllm_medusa.integration.v1.verification import verify
from vllm_medusa.noise import Seeds, next_seeds, own_generator
from vllm_medusa.proposer.steps import MIN_SURVIVAL
from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree import MAX_NODES
from vllm_medusa.tree.draft_trees import DraftTrees


class MedusaModelRunner(CPUModelRunner):
    """vLLM's CPU runner, verifying trees instead of chains."""

    needs_every_token = False  # whether the drafter's KV cache has an entry for each token

    trees: RequestTrees
    speculative_config: Any
    sampler: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self._options = TreeSettings.of(vllm_config)
        stock = self.sampler
        self.sampler = GuidedSampler(stock.logprobs_mode, stock.use_fp64_gumbel)
        self._verifier = functools.partial(verify, self.sampler)
        self._slots: dict[str, int] = {}  # of running requests; vLLM reorders its batch
        self._free = list(range(vllm_config.scheduler_config.max_num_seqs))
        self._drafts = DraftMessage([], [])  # to be sent to the scheduler
        self._drafting: Callable[[], object] | None = None  # deferred until the tokens are sent
        # Some request had a grammar. The scheduler may then draft forced tokens in steps without
        # heads, so it needs a message for each step, even an empty one.
        self._had_grammar = False
        self._shares_noise = self._options.shared_noise and draws_splitmix(self.sampler)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, skipping heads in its checkpoint, then the heads (vLLM does both)."""
        with heads_left_out():
            super().load_model(*args, **kwargs)
        self.trees = RequestTrees(self.vllm_config, self.drafter, self.device, on_host=True)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Check that every layer's attention supports trees."""
        super().initialize_kv_cache(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        own = getattr(self.drafter, "_draft_attn_layer_names", ())
        self.trees.bind(layers, self.kv_cache_config, own)

    def _update_states(self, scheduler_output: Any) -> Any:
        """As in vLLM; also assigns a slot to each running request."""
        result = super()._update_states(scheduler_output)
        for req_id in (
            *scheduler_output.finished_req_ids,
            *(scheduler_output.preempted_req_ids or ()),
        ):
            if (slot := self._slots.pop(req_id, None)) is not None:
                self._free.append(slot)
        added = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for req_id in self.input_batch.req_ids:
            if req_id not in self._slots:
                self._slots[req_id] = self._free.pop()
                added.add(req_id)
        for req_id in added:
            request = self.requests[req_id]
            self.trees.requests.add(
                self._slots[req_id], request.sampling_params, request.num_prompt_tokens
            )
            self._had_grammar |= follows_grammar(request.sampling_params)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step; until the end of `sample_tokens` as plain vLLM if there are no drafts."""
        output = scheduler_output
        uses_trees = (
            output.scheduled_spec_decode_tokens
            or output.scheduled_new_reqs  # their grammars are not known yet
            or self.needs_every_token
            or self._drafts_after(output)
        )
        self.speculative_config = self.vllm_config.speculative_config if uses_trees else None
        return super().execute_model(output, *args, **kwargs)

    def _drafts_after(self, scheduler_output: Any) -> bool:
        """Whether there may be drafts for the step after this one."""
        limit = scheduler_output.num_spec_tokens_to_schedule
        return limit > 0 or self._had_grammar or self._searches(scheduler_output)

    def _searches(self, scheduler_output: Any) -> bool:
        return self.trees.lookup is not None and not skips_lookup(scheduler_output)

    def _slots_of_batch(self) -> np.ndarray:
        return np.array([self._slots[req_id] for req_id in self.input_batch.req_ids])

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        if not scheduler_output.scheduled_spec_decode_tokens:
            self.trees.end()
            config, self.speculative_config = self.speculative_config, None
            try:  # also if it drafts afterwards
                return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
            finally:
                self.speculative_config = config
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        logits_indices, spec_metadata, _ = prepared
        self.trees.chosen_parents = tree_parents(scheduler_output)
        num_nodes = np.asarray(spec_metadata.num_draft_tokens, dtype=np.int64) + 1
        step = self.trees.begin(
            torch.from_numpy(self._slots_of_batch()),
            self.input_batch.req_ids,
            num_nodes,
            torch.from_numpy(np.concatenate(([0], num_nodes.cumsum()))),
            logits_indices,
            self.input_ids.gpu,
        )
        if step is not None:
            base = self.seq_lens[: step.batch_size] - step.tree.num_nodes
            roots = step.root_rows
            self.trees.write_positions(self.positions, base)
            for positions in self.mrope_positions.gpu if self.uses_mrope else ():
                self.trees.write_positions(positions, positions[roots])
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        step = self.trees.step
        if step is None:
            return super()._build_attention_metadata(*args, **kwargs)
        groups = itertools.chain.from_iterable(self.attn_groups)
        step.slot_mappings = kwargs["slot_mappings"]
        with self.trees.in_builders(group.get_metadata_builder() for group in groups):
            return super()._build_attention_metadata(*args, **kwargs)

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        trees, metadata = self.trees, self.input_batch.sampling_metadata
        assert logits is not None
        if self.enable_prompt_embeds and metadata.prompt_token_ids is not None:
            # rows of prompt embeddings may hold another request's stale draft placeholders (-1)
            metadata.prompt_token_ids.clamp_(min=0)
        rule = None if trees.step is None else trees.requests.typical(self._slots_of_batch())
        trees.verdict, output = self._verifier(logits, trees.step, metadata, rule)
        trees.compact()
        return output

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Defer drafting to `take_draft_token_ids`, which vLLM calls after it sent the tokens."""
        tokens = [list(own) for own in sampled_token_ids]  # the scheduler may shorten them
        self._drafting = functools.partial(self._propose, scheduler_output, tokens, *args, **kwargs)
        return [[] for _ in self.input_batch.req_ids]

    def _propose(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft from the last accepted node of every request that continues."""
        trees, batch = self.trees, self.input_batch
        step = trees.step
        states = self._draft_states(
            step,
            trees.end(),
            scheduler_output,
            sampled_token_ids,
            sample_hidden_states,
            hidden_states,
            *args,
        )
        if not self._drafts_after(scheduler_output):
            self._drafts = DraftMessage([], [])
            return [[] for _ in batch.req_ids]
        limit = scheduler_output.num_spec_tokens_to_schedule
        slots = self._slots_of_batch()
        structured = trees.requests.follows_grammar(slots)
        num_tokens = batch.num_tokens_no_spec[: len(slots)].astype(np.int64)
        num_new = np.array([len(tokens) for tokens in sampled_token_ids])
        root = torch.tensor([tokens[-1] if tokens else 0 for tokens in sampled_token_ids])
        depth = trees.useful_depth(slots, num_tokens, num_new)
        stream = self._stream(slots, depth, limit)
        drafts = self._draft(states, root, torch.from_numpy(depth), limit, structured, stream)
        if self._searches(scheduler_output):
            texts, rows = batch.token_ids_cpu[:, : num_tokens.max()], np.arange(len(slots))
            may_copy = trees.requests.may_copy(slots)
            drafts = trees.add_copies(
                drafts, slots, texts, rows, num_tokens, num_new, depth, *may_copy
            )
            if drafts.parents.shape[1] > trees.num_nodes:
                most = torch.where(torch.from_numpy(structured), MAX_NODES, trees.num_nodes - 1)
                drafts = drafts.limited(most)
        where = torch.from_numpy(slots)
        trees.keep(where, drafts.parents)
        self._drafts = tree_drafts(drafts, batch.req_ids, structured.tolist())
        return self._drafts.draft_token_ids

    def _stream(self, slots: np.ndarray, depth: np.ndarray, limit: int) -> Seeds | None:
        """The noise of the next tokens of sampling requests; None: there are none.

        From then on, a request without a seed has its own generator.
        """
        if not self._shares_noise or self._options.heads is None or limit < 1:
            return None
        temperature = self.trees.requests.draw_temperature(slots)
        rows = np.flatnonzero((temperature > 0) & (depth > 0)).tolist()
        if not rows:
            return None
        batch = self.input_batch
        seeds = torch.full((len(slots), self._options.tree.max_depth), -1)
        for row in rows:
            if row not in batch.generators:
                generator = own_generator()
                self.requests[batch.req_ids[row]].generator = generator
                batch.generators[row] = generator
            seeds[row] = next_seeds(batch.generators[row], seeds.shape[1])
        return Seeds(seeds, torch.from_numpy(temperature))

    def _draft(
        self,
        states: Any,
        root: Tensor,
        depth: Tensor,
        limit: int,
        structured: np.ndarray,
        stream: Seeds | None,
    ) -> DraftTrees:
        """Trees of at most ``limit`` drafts; candidates for requests with structured output.

        ``depth``, int64 [B], is the max useful depth per request.
        """
        if self._options.heads is None or limit < 1 or not bool(depth.any()):
            return _roots(len(root))
        maximum = CANDIDATES * limit if structured.any() else limit
        # With a grammar, tokens are likelier than estimated; a fixed budget uses all its nodes.
        may_skip_heads = not structured.any() and not isinstance(self._options.budget, int)
        width, min_survival = min(maximum + 1, MAX_NODES), MIN_SURVIVAL if may_skip_heads else None
        drafts = self.drafter.draft(states, root, width, depth, maximum, min_survival, stream)
        if self.trees.static is None and maximum == limit:
            return drafts
        limits = torch.where(torch.from_numpy(structured), maximum, limit)
        return drafts.limited(limits.masked_fill(depth == 0, 0))

    def _draft_states(
        self,
        step: TreeStep | None,
        verdict: Verdict | None,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sample_hidden_states: Tensor,
        *states: Any,
    ) -> Any:
        """The drafter's input, see `drafter.Drafter`: hidden states [B, H]."""
        if step is None or verdict is None:
            return sample_hidden_states
        return sample_hidden_states[step.cu_nodes[:-1] + verdict.path.last_node]

    @torch.inference_mode()
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draft for the scheduler; None: no drafts were requested."""
        drafting, self._drafting = self._drafting, None
        if drafting is not None:
            drafting()
        drafted = super().take_draft_token_ids() is not None and self._drafts.req_ids
        return self._drafts if drafted else None

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always fits: heads use no positions; the scheduler limits drafts by max_model_len."""
        return True

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As in vLLM, with the generators of requests whose token is discarded hidden.

        So they do not advance in verification, and vLLM does not rewind them, which fails on CPUs.
        """
        generators, hidden = self.input_batch.generators, {}
        if generators:
            mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
            unused = generators.keys() & np.flatnonzero(mask).tolist()
            hidden = {index: generators.pop(index) for index in unused}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(hidden)
            self.speculative_config = self.vllm_config.speculative_config


@functools.lru_cache(maxsize=16)
def _roots(batch: int) -> DraftTrees:
    return DraftTrees.roots(batch, 1, "cpu")
