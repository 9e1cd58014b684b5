"""Lookup on the V2 runner: the step's drafts, with what each request may copy.

Texts are searched where they are, on the device: its last tokens may be known there alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_medusa.lookup.on_device import DraftTrees, LookupOnDevice, continuations, merge
from vllm_medusa.proposer.candidates import IMPOSSIBLE, Proposal
from vllm_medusa.worker.drafts import TreeDrafts
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.v2.trees import Trees


class Copies:
    """Joins what was drafted with continuations from the requests' own texts."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        tree, requests = EngineOptions.of(vllm_config).tree, vllm_config.scheduler_config
        vocab_size = vllm_config.model_config.get_vocab_size()
        most = tree.num_draft_tokens
        self.lookup = LookupOnDevice(vocab_size, requests.max_num_seqs, most, device)
        self._levels, self._most = tree.max_depth, most
        self._last: DraftTrees | None = None

    @staticmethod
    def keep_texts_on_device(states: RequestState) -> None:
        """Replace vLLM's table of the requests' texts, which is in host memory by default.

        Each step searches all of them. vLLM does the same for its own n-grams. Call it while
        nothing else holds the table.
        """
        shape = states.max_num_reqs, states.max_model_len
        states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=states.device)

    def warm_up(self, texts: Tensor) -> None:
        """Compile what finds and joins; ``texts`` is int32 [slots, most tokens of a text]."""
        one = torch.ones(1, dtype=torch.int64, device=texts.device)
        _, found = continuations(texts, one - 1, one, self._most)
        tree = one.new_zeros((1, self._most + 1))
        own = DraftTrees(tree, tree, tree.to(torch.float32), tree)
        merge(own, found, found.to(torch.float32), self._levels)

    def join(
        self,
        proposal: Proposal,
        batch: InputBatch,
        trees: Trees,
        num_tokens: Tensor,
        num_sampled: Tensor,
        depth: Tensor,
        limit: int | None,
    ) -> Proposal:
        """One tree of both for each request.

        Args:
            proposal: of the drafter.
            batch: of B requests.
            trees: know vLLM's state of them and their options.
            num_tokens: integer [B], of their texts by now.
            num_sampled: integer [B], how many of these are new.
            depth: int64 [B], the deepest node that each has a use for.
            limit: drafts of ``proposal`` that are of use; None: all.

        """
        assert trees.states is not None
        slots, lengths = batch.idx_mapping.to(torch.int64), num_tokens.to(torch.int64)
        longest = int(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs].max()) + 1
        texts = trees.states.all_token_ids.gpu[:, :longest]
        free, sampled = trees.requests.may_copy(batch.idx_mapping_np)
        self.lookup.learn(slots, texts, lengths, num_sampled.to(torch.int64), sampled)
        survival = proposal.log_survival
        if limit is not None:
            survival = survival.clone()
            survival[:, limit + 1 :] = IMPOSSIBLE
        own = DraftTrees(
            proposal.token_ids, proposal.parents, survival, torch.zeros_like(proposal.parents)
        )
        found = self._last = self.lookup.extend(
            slots, texts, lengths, own, depth * free, sampled, self._levels
        )
        return Proposal(found.token_ids, found.parents, found.log_survival)

    def latest(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The latest drafts and who proposed them, int64 [B, K], on their way to the host."""
        last = self._last
        if last is None:
            return None
        tokens, by = async_copy_to_np(last.token_ids), async_copy_to_np(last.proposed_by)
        return tokens[:, 1:], by[:, 1:]

    def tell(self, drafts: TreeDrafts) -> None:
        """Add who proposed which of the latest drafts, and the drafts; waits for the device."""
        if self._last is None:
            return
        every, by = self._last.token_ids.tolist(), self._last.proposed_by.tolist()
        for place, (req_id, values) in enumerate(zip(drafts.req_ids, drafts.survival, strict=True)):
            kept = slice(1, 1 + len(values))
            if any(by[place][kept]):
                drafts.proposed_by[req_id] = by[place][kept]
                drafts.draft_token_ids[place] = every[place][kept]
