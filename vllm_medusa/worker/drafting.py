"""The Medusa proposer as vLLM's runner sees it: loads the heads, drafts token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.heads import HydraHeads, MedusaHeads, PackedHeads, PackedHydra, load_heads
from vllm_medusa.proposer.build import Branching, Marginal, build_tree, fill_tree
from vllm_medusa.proposer.candidates import Choices, Proposal
from vllm_medusa.proposer.dispatch import propose, propose_sharded
from vllm_medusa.proposer.drafts import plan_on, source_on
from vllm_medusa.proposer.dynamic import marginals, marginals_sharded
from vllm_medusa.proposer.hydra import Embed, HydraStep
from vllm_medusa.proposer.sharded import VocabShard
from vllm_medusa.proposer.stages import Stages
from vllm_medusa.tree import TokenTree, TreeTensors
from vllm_medusa.tree.dynamic import DynamicTree
from vllm_medusa.worker import compat, sharding
from vllm_medusa.worker.adapters import adapted_heads, adapters_left_out
from vllm_medusa.worker.options import EngineOptions
from vllm_medusa.worker.target_rows import store_target_rows

AnyHeads = MedusaHeads | PackedHeads | PackedHydra


def arranged(heads: MedusaHeads, device: torch.device, rows: slice | None = None) -> AnyHeads:
    """The heads in the form that ``device`` runs best, less the vocabulary outside ``rows``.

    CPUs read packed matrices two to three times faster, one by one. Elsewhere a step's few rows
    wait for launches, so a layer of all heads is one product (``heads`` may be on the host still).
    """
    if device.type == "cpu" and isinstance(heads, HydraHeads):
        return PackedHydra(heads, compat.packed_linear, rows)
    if device.type == "cpu":
        return PackedHeads(heads, compat.packed_linear, rows)
    if rows is not None:
        heads.keep_vocabulary(rows)
    return heads.to(device).requires_grad_(False)


def target_embedding(target: nn.Module) -> Embed:
    """The target's embedding, as it is stored: a model may scale what comes out of it.

    Raises:
        MedusaConfigError: The target has none that could be found.

    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found = [module for module in target.modules() if type(module) is VocabParallelEmbedding]
    if len(found) != 1:
        raise MedusaConfigError(
            f"Hydra heads need the target's embedding of tokens, and {type(target).__name__} has "
            f"{len(found)} of vLLM's; one is needed. Use Medusa heads with this target."
        )
    return found[0]


class MedusaDrafter:
    """Named in the speculative config as the custom proposer class; vLLM instantiates it."""

    heads: AnyHeads
    tree: TreeTensors | None = None  # the one static tree for all; None: dynamic ones
    stages: Stages | None = None  # None: heads that run are run at once
    _sharpness: Tensor | None = None
    _soft_cap: float | None = None  # of the target's logits, where its rows are stored

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = EngineOptions.of(vllm_config)
        self.model_config = vllm_config.model_config
        self.device = torch.device(vllm_config.device_config.device)
        tree = self.options.tree
        if isinstance(tree, DynamicTree):
            if self.has_heads:
                self._source = source_on(tree, self.device)
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

        Of a draft vocabulary its rows are stored with the heads. Of stored LM heads a
        tensor-parallel rank keeps its own rows only.
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
        if heads.shared_lm_head and heads.token_map is not None:
            where = self.device, self.model_config.dtype
            with adapters_left_out(self._adapted):
                self._soft_cap = store_target_rows(heads, target_model, *where)
        shard = self._shard = self._shard_of(heads)
        rows = None
        if shard is not None and not heads.shared_lm_head:
            rows = slice(shard.first_id, shard.first_id + shard.num_ids)
        self.heads = arranged(heads, self.device, rows)
        self.stages = self._stages_of(heads)
        self._embed = target_embedding(target_model) if info.is_hydra else None
        compat.logger.info(
            "Loaded %d of %d %s heads (format %s); %s %d draft nodes%s.",
            heads.num_heads,
            info.num_heads,
            "Hydra" if info.is_hydra else "Medusa",
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
        heads = self.heads if self.has_heads else None
        if isinstance(heads, nn.Module):  # CPUs, which never sleep, pack theirs
            for name, tensor in [*heads.named_parameters(), *heads.named_buffers()]:
                module.register_buffer(name.replace(".", "_"), tensor.detach())
        return module

    @torch.inference_mode()
    def propose(self, hidden_states: Tensor, root: Tensor) -> Tensor:
        """Draft one tree for each request, the same on every rank.

        Args:
            hidden_states: [B, hidden_size], the target's last hidden state at each request's last
                accepted node.
            root: int64 [B], the tokens that the target gave last.

        Returns:
            int64 [B, N - 1] token ids in node order, the root left out.

        """
        assert self.tree is not None
        if self._embed is not None:
            plan = plan_on(self.options.tree, self.device)
            return fill_tree(self._hydra(hidden_states), plan, root)[:, 1:]
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
        least: float | None = None,
    ) -> Proposal:
        """Draft a tree of its own for each request, the same on every rank.

        Args:
            hidden_states: [B, hidden_size], as for `propose`.
            root: int64 [B], as for `propose`.
            num_nodes: Nodes of each tree, root included.
            max_depth: int64 [B], the deepest node that each request has a use for.
            limit: Drafts of a request that are of use, from 1; the best so many lie no deeper, so
                as many heads run at most. None: all.
            least: Survival that some draft needs for deeper heads to run, where there are
                `stages`. None: all run.

        """
        step: Marginal | Branching = _Step(self, hidden_states, max_depth, least)
        if self._embed is not None:
            step = self._hydra(hidden_states)
        return build_tree(step, self._source, root, num_nodes, max_depth, limit)

    def marginals(self, hidden_states: Tensor, depth: int, width: int, first: int = 0) -> Choices:
        """The best ``width`` choices of the first ``depth`` heads, less those before ``first``."""
        logits = self._logits(hidden_states, depth, first)
        sharpness = None if self._sharpness is None else self._sharpness[first:]
        return self._choose(logits, width, sharpness)

    def _choose(self, logits: Tensor, width: int, sharpness: Tensor | None) -> Choices:
        """Read the choices off logits [B, D, V] of this rank."""
        depth, mapped = logits.shape[1], self.heads.token_map
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        if self._shard is None:
            return marginals(logits, depth, width, sharpness, mapped)
        return marginals_sharded(
            logits, depth, width, self._shard, sharding.all_gather, sharpness, mapped
        )

    def _hydra(self, hidden_states: Tensor) -> HydraStep:
        assert self._embed is not None and isinstance(self.heads, HydraHeads | PackedHydra)
        lm_head = self._lm_head_without_adapters
        return HydraStep(
            self.heads, hidden_states, self._embed, lm_head, self._sharpness, self._choose
        )

    def _lm_head_without_adapters(self, rows: Tensor) -> Tensor:
        """The target's logits [T, V], or this rank's part of the vocabulary."""
        name = "compute_logits" if self._shard is None else "compute_logits_local"
        with adapters_left_out(self._adapted):
            logits: Tensor = getattr(self._target, name)(rows)
        return logits

    def _logits(
        self, hidden_states: Tensor, num_heads: int | None = None, first: int = 0
    ) -> Tensor:
        """[B, H] -> [B, K, V_draft] of the first heads, or this rank's part of the vocabulary.

        Packed heads can begin behind the ``first`` few.
        """
        assert not isinstance(self.heads, PackedHydra)
        name = "compute_logits" if self._shard is None else "compute_logits_local"
        lm_head = getattr(self._target, name, None)
        with adapters_left_out(self._adapted):
            if first:
                assert isinstance(self.heads, PackedHeads)
                states = self.heads(hidden_states, num_heads, first)
                return self.heads.compute_logits(states, lm_head, first)
            return self.heads.compute_logits(self.heads(hidden_states, num_heads), lm_head)

    def _stages_of(self, heads: MedusaHeads) -> Stages | None:
        """How packed heads may run in two goes."""
        if not isinstance(self.heads, PackedHeads):
            return None
        rows = heads.draft_vocab_size // sharding.num_ranks()
        own, again = self.heads.own_weights, heads.hidden_size * rows
        if heads.num_lm_heads == heads.num_heads:
            own, again = own + again, 0
        return Stages(own, again)

    def _shard_of(self, heads: MedusaHeads) -> VocabShard | None:
        if not heads.shared_lm_head:
            return sharding.shard_of_rows(heads.draft_vocab_size)
        row = torch.zeros(1, heads.hidden_size, dtype=self.model_config.dtype, device=self.device)
        with adapters_left_out(self._adapted):
            return sharding.shard_of_target(self._target, row, heads.vocab_size)


@dataclass(frozen=True)
class _Step:
    """The heads at one step, as the builder of trees asks them."""

    drafter: MedusaDrafter
    hidden_states: Tensor  # [B, H]
    max_depth: Tensor  # int64 [B]
    least: float | None

    def marginals(self, depth: int, width: int) -> Choices:
        """See `build.Marginal`."""
        stages = self.drafter.stages
        if stages is None or self.least is None:
            return self.drafter.marginals(self.hidden_states, depth, width)

        def ask(first: int, end: int) -> Choices:
            return self.drafter.marginals(self.hidden_states, end, width, first)

        return stages.choices(ask, depth, self.max_depth, self.least)
