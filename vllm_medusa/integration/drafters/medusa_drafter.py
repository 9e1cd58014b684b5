"""The Medusa proposer for vLLM's runner: loads the heads and drafts token ids."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.cpu import PackedHeads
from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.integration import compat
from vllm_medusa.integration.drafters import sharding
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.target import adapted_heads, adapters_left_out, store_target_rows
from vllm_medusa.noise import LevelNoise, Noise, Stream
from vllm_medusa.proposer.build import build_tree, fill_tree, source_on, tensors_on
from vllm_medusa.proposer.choices import Choices, read_choices, read_choices_sharded
from vllm_medusa.proposer.hydra import HydraBeam
from vllm_medusa.proposer.steps import Embed, HydraStep, MedusaStep, Stages
from vllm_medusa.proposer.topk import VocabShard
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam

AnyHeads = MedusaHeads | PackedHeads | PackedHydra


def arranged(heads: MedusaHeads, device: torch.device, rows: slice | None = None) -> AnyHeads:
    """The heads in the fastest form for ``device``, restricted to vocabulary ``rows``.

    CPUs read packed matrices two to three times faster, one matrix at a time. On other devices the
    few rows of a step are launch-bound, so one layer of all heads is one product (``heads`` may
    still be on the host).
    """
    if rows is not None:
        heads.keep_vocabulary(rows)
    if device.type == "cpu" and isinstance(heads, HydraHeads):
        return PackedHydra(heads, compat.packed_linear)
    if device.type == "cpu":
        return PackedHeads(heads, compat.packed_linear)
    return heads.to(device).requires_grad_(False)


def target_embedding(target: nn.Module) -> Embed:
    """The target's embedding weights, without a scale that the model may apply to its output.

    Raises MedusaConfigError: the target has no usable embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found = [module for module in target.modules() if type(module) is VocabParallelEmbedding]
    if len(found) != 1:
        raise MedusaConfigError(
            f"Hydra heads need the target's token embedding, but {type(target).__name__} has "
            f"{len(found)} vLLM embeddings; one is needed. Use Medusa heads with this target."
        )
    return found[0]


class MedusaDrafter:
    """vLLM instantiates it as the custom proposer class of the speculative config."""

    heads: AnyHeads
    beam: HydraBeam | None = None  # in place of ``heads``
    tree: TreeTensors | None = None
    scratch = 0
    stages: Stages | None = None  # None: all heads run at once
    _sharpness: Tensor | None = None
    _soft_cap: float | None = None  # of the target's logits, if its rows are stored

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = TreeSettings.of(vllm_config)
        self.model_config = vllm_config.model_config
        self.device = torch.device(vllm_config.device_config.device)
        tree = self.options.tree
        if isinstance(tree, TokenTree):
            self.tree = tensors_on(tree, self.device)
        else:
            if self.options.heads is not None:
                self._source = source_on(tree, self.device)
            if tree.sharpness is not None:
                self._sharpness = torch.tensor(tree.sharpness, device=self.device)
        self._target: Any = None
        self._shard: VocabShard | None = None  # None: this rank handles the whole vocabulary

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads for ``target_model``; heads without an LM head use the target's.

        If such heads have a draft vocabulary, the target's rows for it are stored with them. Each
        tensor-parallel rank keeps only its own rows of stored LM heads.
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
        self._embed = target_embedding(target_model) if info.is_hydra else None
        self.beam = self._beam_of(heads, exact=info.dtype == torch.float32)
        if self.beam is None:
            self.heads = arranged(heads, self.device, rows)
            self.stages = self._stages_of(heads)
        compat.logger.info(
            "Loaded %d of %d %s heads (format %s); %s %d draft nodes%s.",
            heads.num_heads,
            info.num_heads,
            "Hydra" if info.is_hydra else "Medusa",
            info.format,
            "the tree has" if self.tree is not None else "dynamic trees have at most",
            self.options.tree.num_draft_tokens,
            ", including lookup" if self.options.lookup else "",
        )

    def buffers_for_sleep(self) -> nn.Module:
        """The heads' tensors as buffers, for vLLM's sleep level 2.

        Level 2 drops all weights; on wake-up the target's are reloaded, but not the heads'. Buffers
        are kept, including those of the runner's draft model.
        """
        module = nn.Module()
        heads = getattr(self, "heads", None)
        if isinstance(heads, nn.Module):  # packed on CPUs, which do not support sleep
            for name, tensor in [*heads.named_parameters(), *heads.named_buffers()]:
                module.register_buffer(name.replace(".", "_"), tensor.detach())
        return module

    @torch.inference_mode()
    def draft(
        self,
        states: Tensor,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
        min_survival: float | None = None,
        stream: Stream | None = None,
    ) -> DraftTrees:
        """See `drafter.Drafter`; a static tree is drafted whole."""
        noise = None if stream is None else Noise(stream, self._scored)
        if self.beam is not None:
            assert isinstance(self._source, Beam)
            depth = self._source.within(num_nodes if limit is None else limit).depth
            levels = None if noise is None else noise.at(0, depth)
            found = self.beam.draft(states, root, self._source, num_nodes, max_depth, limit, levels)
            return found or DraftTrees.roots(len(root), num_nodes, root.device)
        step: MedusaStep | HydraStep
        if self._embed is not None:
            assert isinstance(self.heads, HydraHeads | PackedHydra)
            step = HydraStep(
                self.heads, states, self._embed, self._lm_head, self._sharpness, self._read, noise
            )
        else:
            assert not isinstance(self.heads, PackedHydra)
            step = MedusaStep(
                self.heads,
                states,
                self._lm_head,
                self._sharpness,
                self._read,
                noise,
                None if min_survival is None or self.tree is not None else self.stages,
                max_depth,
                min_survival or 0.0,
            )
        if self.tree is None:
            return build_tree(step, self._source, root, num_nodes, max_depth, limit)
        assert isinstance(self.options.tree, TokenTree)
        return fill_tree(step, self.options.tree, root)

    propose = draft  # vLLM requires the name of custom proposers; the runner calls `draft`

    def _read(
        self, logits: Tensor, width: int, sharpness: Tensor | None, noise: LevelNoise | None
    ) -> Choices:
        """Read the choices from logits [B, D, V] of this rank."""
        mapped = self.heads.token_map
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        if self._shard is None:
            return read_choices(logits, width, sharpness, noise, mapped)
        gather = sharding.all_gather
        return read_choices_sharded(logits, width, self._shard, gather, sharpness, noise, mapped)

    @functools.cached_property
    def _scored(self) -> Tensor:
        """The target's token ids that this rank scores, int64 [V_draft]."""
        heads, shard = self.heads if self.beam is None else self.beam, self._shard
        ids = heads.token_map
        if ids is None:
            ids = torch.arange(self.model_config.get_vocab_size(), device=self.device)
        return ids if shard is None else ids[shard.first_id : shard.first_id + shard.num_ids]

    def _lm_head(self, rows: Tensor) -> Tensor:
        """The target's logits [T, V], or this rank's part of the vocabulary; no LoRA adapters."""
        name = "compute_logits" if self._shard is None else "compute_logits_local"
        with adapters_left_out(self._adapted):
            logits: Tensor = getattr(self._target, name)(rows)
        return logits

    def _beam_of(self, heads: MedusaHeads, *, exact: bool) -> HydraBeam | None:
        """The C++ kernel for Hydra heads with dynamic trees on a single CPU rank, else None."""
        if (
            self.device.type != "cpu"
            or not isinstance(heads, HydraHeads)
            or self._shard is not None
            or self.tree is not None
        ):
            return None
        embedding, source = getattr(self._embed, "weight", None), self._source
        assert isinstance(source, Beam)
        if embedding is None or not HydraBeam.serves(heads, embedding, source):
            return None
        return HydraBeam(heads, embedding, self._sharpness, self._soft_cap, exact=exact)

    def _stages_of(self, heads: MedusaHeads) -> Stages | None:
        """The criterion by which packed heads skip deep heads."""
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
