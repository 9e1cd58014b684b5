"""The Medusa proposer as vLLM's runner sees it: loads the heads, drafts token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_medusa.heads import MedusaHeads, PackedHeads, load_heads
from vllm_medusa.proposer.build import build_tree
from vllm_medusa.proposer.candidates import Choices, Proposal
from vllm_medusa.proposer.dispatch import propose, propose_sharded
from vllm_medusa.proposer.dynamic import marginals, marginals_sharded
from vllm_medusa.proposer.sharded import VocabShard
from vllm_medusa.tree import TokenTree, TreeTensors
from vllm_medusa.tree.dynamic import DynamicTree
from vllm_medusa.tree.pool import Pool
from vllm_medusa.worker import compat, sharding
from vllm_medusa.worker.adapters import adapted_heads, adapters_left_out
from vllm_medusa.worker.options import EngineOptions


def arranged(
    heads: MedusaHeads, device: torch.device, rows: slice | None = None
) -> MedusaHeads | PackedHeads:
    """The heads in the form that ``device`` runs best, less the vocabulary outside ``rows``.

    CPUs read packed matrices two to three times faster, one by one. Elsewhere a step's few rows
    wait for launches, so a layer of all heads is one product (``heads`` may be on the host still).
    """
    if device.type == "cpu":
        return PackedHeads(heads, compat.packed_linear, rows)
    if rows is not None:
        heads.keep_vocabulary(rows)
    return heads.to(device).requires_grad_(False)


class MedusaDrafter:
    """Named in the speculative config as the custom proposer class; vLLM instantiates it."""

    heads: MedusaHeads | PackedHeads
    tree: TreeTensors | None = None  # the one static tree for all; None: dynamic ones
    _sharpness: Tensor | None = None

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = EngineOptions.of(vllm_config)
        self.model_config = vllm_config.model_config
        self.device = torch.device(vllm_config.device_config.device)
        tree = self.options.tree
        if isinstance(tree, DynamicTree):
            assert isinstance(tree.pool, TokenTree)
            if self.has_heads:
                self._pool = Pool.from_tree(tree.pool, self.device)
            if tree.sharpness is not None:
                self._sharpness = torch.tensor(tree.sharpness, device=self.device)
        else:
            assert isinstance(tree, TokenTree)
            self.tree = TreeTensors.from_tree(tree, self.device)
        self._target: Any = None
        self._shard: VocabShard | None = None  # None: this rank ranks the whole vocabulary

    @property
    def has_heads(self) -> bool:
        """False where only what a request said before is drafted."""
        return self.options.heads is not None

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads beside ``target_model``, whose LM head serves heads that store none.

        Of stored LM heads a tensor-parallel rank keeps its own rows only, and no others ever come
        to its device.
        """
        if self.options.heads is None:
            compat.logger.info(
                "No Medusa heads, lookup only; dynamic trees have at most %d draft nodes.",
                self.options.tree.num_draft_tokens,
            )
            return
        self._target = target_model
        self._adapted = adapted_heads(target_model)
        in_parts = sharding.num_ranks() > 1
        heads, info = load_heads(
            self.options.heads,
            hidden_size=self.model_config.get_hidden_size(),
            vocab_size=self.model_config.get_vocab_size(),
            dtype=self.model_config.dtype,
            device="cpu" if in_parts else self.device,
            revision=self.options.revision,
            max_heads=self.options.tree.max_depth,
        )
        shard = self._shard = self._shard_of(heads)
        rows = None
        if shard is not None and not heads.shared_lm_head:
            rows = slice(shard.first_id, shard.first_id + shard.num_ids)
        self.heads = arranged(heads, self.device, rows)
        compat.logger.info(
            "Loaded %d of %d Medusa heads (format %s); %s %d draft nodes%s.",
            heads.num_heads,
            info.num_heads,
            info.format,
            "the tree has" if self.tree is not None else "dynamic trees have at most",
            self.options.tree.num_draft_tokens,
            ", lookup's among them" if self.options.lookup else "",
        )

    def buffers_for_sleep(self) -> nn.Module:
        """The heads' tensors as buffers, for vLLM's sleep of level 2.

        It gives all weights up, to be loaded anew by whoever put the engine to sleep, and nobody
        would load the heads. Buffers it keeps, of what the runner calls the draft model too.
        """
        module = nn.Module()
        if isinstance(self.heads, nn.Module):  # CPUs, which never sleep, pack theirs
            for name, tensor in [*self.heads.named_parameters(), *self.heads.named_buffers()]:
                module.register_buffer(name.replace(".", "_"), tensor.detach())
        return module

    @torch.inference_mode()
    def propose(self, hidden_states: Tensor) -> Tensor:
        """Draft one tree for each request, the same on every rank.

        Args:
            hidden_states: [B, hidden_size], the target's last hidden state at each request's last
                accepted node.

        Returns:
            int64 [B, N - 1] token ids in node order, the root left out.

        """
        assert self.tree is not None
        logits, mapped = self._logits(hidden_states), self.heads.token_map
        if self._shard is None:
            return propose(logits, self.tree, mapped)[:, 1:]
        tokens = propose_sharded(logits, self.tree, self._shard, sharding.all_gather, mapped)
        return tokens[:, 1:]

    @torch.inference_mode()
    def grow(
        self,
        hidden_states: Tensor,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
    ) -> Proposal:
        """Draft a tree of its own for each request, the same on every rank.

        Args:
            hidden_states: [B, hidden_size], as for `propose`.
            root: int64 [B], the tokens that the target gave last.
            num_nodes: Nodes of each tree, root included.
            max_depth: int64 [B], the deepest node that each request has a use for.
            limit: Drafts of a request that are of use, from 1; the best so many lie no deeper, so
                as many heads run at most. None: all.

        """
        step = _Step(self, hidden_states)
        return build_tree(step, self._pool, root, num_nodes, max_depth, limit)

    def marginals(self, hidden_states: Tensor, depth: int, width: int) -> Choices:
        """The best ``width`` choices of the first ``depth`` heads."""
        logits, mapped = self._logits(hidden_states, depth), self.heads.token_map
        if self._shard is None:
            return marginals(logits, depth, width, self._sharpness, mapped)
        return marginals_sharded(
            logits, depth, width, self._shard, sharding.all_gather, self._sharpness, mapped
        )

    def _logits(self, hidden_states: Tensor, num_heads: int | None = None) -> Tensor:
        """[B, H] -> [B, K, V_draft] of the first heads, or this rank's part of the vocabulary."""
        whole = self._shard is None
        name = "compute_logits" if whole else "compute_logits_local"
        with adapters_left_out(self._adapted):
            return self.heads.compute_logits(
                self.heads(hidden_states, num_heads), getattr(self._target, name, None)
            )

    def _shard_of(self, heads: MedusaHeads) -> VocabShard | None:
        if not heads.shared_lm_head:
            return sharding.shard_of_rows(heads.draft_vocab_size)
        if heads.token_map is not None:  # its ids are strewn over the target's shards
            return None
        row = torch.zeros(1, heads.hidden_size, dtype=self.model_config.dtype, device=self.device)
        with adapters_left_out(self._adapted):
            return sharding.shard_of_target(self._target, row, heads.vocab_size)


@dataclass(frozen=True)
class _Step:
    """The heads at one step, as the builder of trees asks them."""

    drafter: MedusaDrafter
    hidden_states: Tensor  # [B, H]

    def marginals(self, depth: int, width: int) -> Choices:
        """See `build.Marginal`."""
        return self.drafter.marginals(self.hidden_states, depth, width)
