"""The V1 model runner with trees: wiring only.

A step, in vLLM's order: `_prepare_inputs` (the nodes' positions), `_build_attention_metadata` (the
tree's part of it), the forward pass, `_sample` (verify, then compact the KV cache),
`propose_draft_token_ids` (the next trees).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_medusa.proposer.stages import LEAST
from vllm_medusa.sampler import Verdict
from vllm_medusa.scorer.positions import write_node_positions
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree import MAX_NODES, TreeBatch
from vllm_medusa.worker.checks import check_layers
from vllm_medusa.worker.cpu_attention import TreeMetadataBuilder, compact_group
from vllm_medusa.worker.drafts import TreeDrafts, tree_parents
from vllm_medusa.worker.grammar import Candidates
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.requests import CANDIDATES, follows_grammar
from vllm_medusa.worker.v1.copies import Copies
from vllm_medusa.worker.v1.requests import TypicalRequests
from vllm_medusa.worker.v1.topologies import Topologies, depth_of
from vllm_medusa.worker.v1.verification import TreeVerifier
from vllm_medusa.worker.weights import heads_left_out


class MedusaModelRunner(CPUModelRunner):
    """vLLM's CPU runner, verifying trees instead of chains."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self._options = EngineOptions.of(vllm_config)
        self._verifier = TreeVerifier(self.sampler)
        self._topologies: Topologies | None = None  # None: one static tree
        self.copies: Copies | None = None  # None: no lookup
        self._survival: dict[str, list[float]] = {}  # of the drafts on their way to the scheduler
        self._candidates: dict[str, Candidates] = {}  # on their way too, see `follows_grammar`
        self._told: Mapping[str, list[int]] = {}  # parents of the step's drafts, from the scheduler
        self._step: TreeStep | None = None  # None: no request has drafts, as in plain vLLM
        self._verdict: Verdict | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, then the heads (vLLM does both); heads in its checkpoint are no part."""
        with heads_left_out():
            super().load_model(*args, **kwargs)
        if self.drafter.tree is None:
            self._topologies = Topologies(self._options.tree.max_depth)
        if self._options.lookup:
            vocab_size = self.model_config.get_vocab_size()
            self.copies = Copies(vocab_size, self._options.tree.num_draft_tokens)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Make sure that every layer's attention is the one with trees."""
        super().initialize_kv_cache(*args, **kwargs)
        check_layers(self.compilation_config.static_forward_context, self.kv_cache_config)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        logits_indices, spec_metadata, _ = prepared
        self._step = None
        if not any(spec_metadata.num_draft_tokens):
            return prepared
        self._told = tree_parents(scheduler_output)
        num_nodes = np.asarray(spec_metadata.num_draft_tokens, dtype=np.int64) + 1
        step = TreeStep.build(self._trees, num_nodes, logits_indices, self.input_ids.gpu)
        self._write_positions(step)
        self._step = step
        return prepared

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        """As vLLM makes it, but for steps without drafts, in which only last rows count."""
        if num_draft_tokens.any():
            return super()._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)
        ends, nothing = torch.from_numpy(cu_num_scheduled_tokens), torch.empty(0, dtype=torch.int32)
        count = torch.zeros(len(num_draft_tokens), dtype=torch.int32)
        return SpecDecodeMetadata(
            draft_token_ids=nothing,
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=count,
            cu_num_sampled_tokens=count,
            target_logits_indices=nothing,
            bonus_logits_indices=nothing,
            logits_indices=ends - 1,
        )

    def _write_positions(self, step: TreeStep) -> None:
        """Slots stay where vLLM put them; RoPE goes by depth, in each of its dimensions."""
        tree, roots = step.tree, step.root_rows
        base = self.seq_lens[: step.batch_size] - tree.num_nodes
        write_node_positions(
            self.positions, base, tree.depths, step.cu_nodes, len(step.rows), roots
        )
        for positions in self.mrope_positions.gpu if self.uses_mrope else ():
            write_node_positions(
                positions, positions[roots], tree.depths, step.cu_nodes, len(step.rows), roots
            )

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        slot_mappings = kwargs.get("slot_mappings")
        if step is None or slot_mappings is None:
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
        step, metadata = self._step, self.input_batch.sampling_metadata
        assert logits is not None
        if self.enable_prompt_embeds and metadata.prompt_token_ids is not None:
            # in place of embeddings stands what another request left: placeholders (-1) of drafts
            metadata.prompt_token_ids.clamp_(min=0)
        typical = None if step is None else self._typical_requests()
        self._verdict, output = self._verifier(logits, step, metadata, typical, self._discarded())
        if step is not None and self._verdict is not None:
            self._compact(step, self._verdict)
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
        """Draft from the last accepted node of every request that goes on.

        For those that follow a grammar it is the scheduler that chooses, see `follows_grammar`.
        """
        step, verdict = self._step, self._verdict
        self._step = self._verdict = None
        self._candidates = {}
        states = sample_hidden_states, hidden_states, *args
        hidden = self._drafts_from(step, verdict, scheduler_output, sampled_token_ids, *states)
        limit = scheduler_output.num_spec_tokens_to_schedule
        if self._topologies is not None:
            has_heads = self._options.heads is not None
            drafts = self._grow(hidden, sampled_token_ids, limit if has_heads else 0)
            return self._copy(drafts, sampled_token_ids, self._topologies)
        root = torch.tensor([tokens[-1] if tokens else 0 for tokens in sampled_token_ids])
        proposal = self.drafter.propose(hidden, root)[:, :limit]
        parents = self.drafter.tree.parents[1 : limit + 1].tolist()
        drafts = []
        for req_id, draft, tokens in zip(
            self.input_batch.req_ids, proposal.tolist(), sampled_token_ids, strict=True
        ):
            chosen_later = follows_grammar(self._params(req_id))
            if tokens and draft and chosen_later:
                self._candidates[req_id] = Candidates(draft, parents)
            drafts.append([] if chosen_later or not tokens else draft)
        return drafts

    def _drafts_from(
        self,
        step: TreeStep | None,
        verdict: Verdict | None,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sample_hidden_states: Tensor,
        *states: Any,
    ) -> Any:
        """What the drafter goes by, a row for each request: the hidden state [B, H]."""
        if step is None or verdict is None:
            return sample_hidden_states
        return sample_hidden_states[step.cu_nodes[:-1] + verdict.path.last_node]

    def _grow(self, hidden_states: Any, sampled_token_ids: Any, limit: int) -> list[list[int]]:
        """Dynamic trees of at most ``limit`` drafts, for the requests that have a use for them."""
        topologies, req_ids = self._topologies, self.input_batch.req_ids
        assert topologies is not None
        drafts: list[list[int]] = [[] for _ in req_ids]
        self._survival = {}
        if limit < 1:
            return drafts
        useful = [
            self._useful_depth(req_id) if t else 0
            for req_id, t in zip(req_ids, sampled_token_ids, strict=True)
        ]
        chosen = [index for index, depth in enumerate(useful) if depth > 0]
        if not chosen:
            return drafts
        names = [req_ids[index] for index in chosen]
        chosen_later = {name for name in names if follows_grammar(self._params(name))}
        most = CANDIDATES * limit if chosen_later else limit
        width = min(most + 1, MAX_NODES)
        max_depth = torch.tensor([useful[index] for index in chosen])
        root = torch.tensor([sampled_token_ids[index][-1] for index in chosen])
        # a grammar makes tokens likelier than the drafter knows; a number of nodes is to be had
        rests = not chosen_later and not isinstance(self._options.budget, int)
        least = {"least": LEAST} if rests and self.drafter.stages else {}
        states = hidden_states[chosen]
        proposal = self.drafter.grow(states, root, width, max_depth, most, **least)
        topologies.keep(names, proposal.parents, self.requests)
        counts = proposal.num_nodes.tolist()
        tokens, survival = proposal.token_ids.tolist(), proposal.log_survival.exp().tolist()
        for row, (index, name) in enumerate(zip(chosen, names, strict=True)):
            if name in chosen_later:
                kept = slice(1, counts[row])
                parents = topologies.parents(name, counts[row])
                self._candidates[name] = Candidates(tokens[row][kept], parents, survival[row][kept])
            else:
                kept = slice(1, min(counts[row], limit + 1))
                drafts[index], self._survival[name] = tokens[row][kept], survival[row][kept]
        return drafts

    def _copy(
        self, drafts: list[list[int]], sampled_token_ids: Any, topologies: Topologies
    ) -> list[list[int]]:
        """The drafts, with what requests that follow no grammar may copy."""
        copies, batch = self.copies, self.input_batch
        if copies is None:
            return drafts
        copies.begin(self.requests, len(drafts))
        for index, (req_id, said) in enumerate(zip(batch.req_ids, sampled_token_ids, strict=True)):
            copies.lookup.learn(req_id, said)
            depth = self._useful_depth(req_id) if said else 0
            if depth > 0 and not follows_grammar(self._params(req_id)):
                survival = self._survival.get(req_id, [])
                drafts[index], self._survival[req_id] = copies.extend(
                    batch, index, depth, drafts[index], survival, topologies
                )
        return drafts

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the scheduler; dynamic ones with their survivals."""
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        survival = [self._survival.get(req_id, []) for req_id in drafts.req_ids]
        candidates, self._candidates = self._candidates, {}
        by = {} if self.copies is None else self.copies.proposed_by
        return TreeDrafts(drafts.req_ids, drafts.draft_token_ids, survival, candidates, by)

    def _useful_depth(self, req_id: str) -> int:
        """How deep a node can be and still give a token that the request keeps; 0: no drafts."""
        request = self.requests[req_id]
        params = request.sampling_params
        if params is None:
            return 0
        length = request.num_prompt_tokens + len(request.output_token_ids)
        left = self.max_model_len - length
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - len(request.output_token_ids))
        return left - 1  # the step's last token needs no node

    def _trees(self, width: int, num_nodes: Tensor) -> TreeBatch:
        """The topologies that the step verifies; the scheduler's where it chose."""
        req_ids, told = self.input_batch.req_ids, self._told
        chosen = [row for row, req_id in enumerate(req_ids) if req_id in told]
        counts = num_nodes.index_fill(0, torch.tensor(chosen), 1) if chosen else num_nodes
        if self._topologies is None:
            batch = self.drafter.tree.batch(width, counts)
        else:
            batch = self._topologies.trees(req_ids, width, counts)
        if not chosen:
            return batch
        parents = torch.full((len(chosen), width), -1)
        for place, row in enumerate(chosen):
            own = told[req_ids[row]]
            parents[place, 1 : 1 + len(own)] = torch.tensor(own)
        index = torch.tensor(chosen)
        deepest = max(depth_of(told[req_ids[row]]) for row in chosen)
        return batch.with_trees(index, parents, num_nodes[index], deepest)

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
            names = self._targets_layers(group.layer_names)
            compact_group(layers, names, step.slots(gid), path.nodes, path.num_accepted)

    def _targets_layers(self, names: list[str]) -> list[str]:
        """Those of the attention layers ``names`` that verify."""
        return names

    def _typical_requests(self) -> TypicalRequests | None:
        params = [self._params(req_id) for req_id in self.input_batch.req_ids]
        return TypicalRequests.of(params, self._options.acceptance, self.device)

    def _discarded(self) -> list[int]:
        mask = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return np.nonzero(mask)[0].tolist()

    def _params(self, req_id: str) -> SamplingParams | None:
        return self.requests[req_id].sampling_params
