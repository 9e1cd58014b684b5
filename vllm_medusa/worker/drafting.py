"""The Medusa proposer as vLLM's runner sees it: loads the heads, drafts token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_medusa.heads import MedusaHeads, PackedHeads, load_heads
from vllm_medusa.proposer import draft
from vllm_medusa.proposer.sharded import VocabShard, propose_sharded
from vllm_medusa.tree import TreeTensors
from vllm_medusa.worker import compat, sharding
from vllm_medusa.worker.options import EngineOptions

logger = init_logger(__name__)


class MedusaDrafter:
    """Named in the speculative config as the custom proposer class; vLLM instantiates it."""

    heads: PackedHeads

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = EngineOptions.of(vllm_config)
        self.model_config = vllm_config.model_config
        self.device = torch.device(vllm_config.device_config.device)
        self.tree = TreeTensors.from_tree(self.options.tree, self.device)
        self._target: Any = None
        self._shard: VocabShard | None = None  # None: this rank ranks the whole vocabulary

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads beside ``target_model``, whose LM head serves heads that store none.

        Of stored LM heads a tensor-parallel rank keeps its own rows only.
        """
        self._target = target_model
        heads, info = load_heads(
            self.options.heads,
            hidden_size=self.model_config.get_hidden_size(),
            vocab_size=self.model_config.get_vocab_size(),
            dtype=self.model_config.dtype,
            device=self.device,
            revision=self.options.revision,
            max_heads=self.options.tree.max_depth,
        )
        shard = self._shard = self._shard_of(heads)
        rows = None
        if shard is not None and not heads.shared_lm_head:
            rows = slice(shard.first_id, shard.first_id + shard.num_ids)
        self.heads = PackedHeads(heads, compat.packed_linear, rows)
        logger.info("Loaded %s; the tree has %d draft nodes.", info, self.tree.num_nodes - 1)

    @torch.inference_mode()
    def propose(self, hidden_states: Tensor) -> Tensor:
        """Draft one tree for each request, the same on every rank.

        Args:
            hidden_states: [B, hidden_size], the target's last hidden state at each request's last
                accepted node.

        Returns:
            int64 [B, N - 1] token ids in node order, the root left out.

        """
        if self._shard is None:
            return draft(self.heads, hidden_states, self.tree, self._target.compute_logits)[:, 1:]
        x = self.heads(hidden_states)
        local = getattr(self._target, "compute_logits_local", None)
        logits = self.heads.compute_logits(x, local)  # [B, K, V_shard]
        return propose_sharded(
            logits, self.tree, self._shard, sharding.all_gather, self.heads.token_map
        )[:, 1:]

    def _shard_of(self, heads: MedusaHeads) -> VocabShard | None:
        if not heads.shared_lm_head:
            return sharding.shard_of_rows(heads.draft_vocab_size)
        if heads.token_map is not None:  # its ids are strewn over the target's shards
            return None
        row = torch.zeros(1, heads.hidden_size, dtype=self.model_config.dtype, device=self.device)
        return sharding.shard_of_target(self._target, row, heads.vocab_size)
