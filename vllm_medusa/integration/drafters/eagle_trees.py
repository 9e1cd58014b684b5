"""Trees from an EAGLE drafter or MTP module, with its own KV cache, for both of vLLM's runners.

A drafter's layer takes features of the target, shifted by one: its entry at position p combines
the target's hidden states there and the token at p + 1. So the entries of all accepted tokens
can be exact: after each verification the accepted path is run through the drafter with the
target's own hidden states, into the path's slots. Branches use scratch slots after them. A branch's
hidden states are the drafter's own; the next prefill overwrites its entries.

The entries of a drafter with one layer do not depend on attention. So tokens whose states are not
needed, mostly prompts, skip it (`EagleTrees.enter`), and those of steps that do not draft are
deferred and processed together (`PendingTokens`).

    slots    | exact, up to the token before x ............ | scratch: level 1 | level 2 | ...
    tokens     t1 t2 ... x (drawn last)                       k nodes            k nodes

A P-EAGLE drafter (https://arxiv.org/abs/2602.01469) needs one pass for all levels: each level below
the first has one entry, of a mask token and a learned state, so its choices do not depend on the
branch (`_Levels`).

An MTP module differs in two ways: one state is both the input of its LM head and of its next step
(except DeepSeek's), and it computes logits itself (it may norm the state first). vLLM's module
norms its inputs.

The host knows only shapes and upper bounds. No host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_medusa.heads.eagle_checkpoint import mask_entry
from vllm_medusa.heads.files import is_finite
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.integration.drafters.accepted_paths import NO_SLOT, AcceptedPaths, Tokens
from vllm_medusa.integration.drafters.eagle_kernel import (
    EntryLayer,
    eagle_cache,
    eagle_weights,
    entry_layer,
)
from vllm_medusa.integration.startup.eagle_options import scratch_of
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.noise import LevelNoise, Noise, Stream
from vllm_medusa.proposer.beam import beam_call
from vllm_medusa.proposer.build import build_tree, tensors_on
from vllm_medusa.proposer.choices import Choices, read_choices
from vllm_medusa.proposer.eagle_cpu import MAX_ROWS, EagleBeam, EagleCache
from vllm_medusa.sampler.path import Path
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam, DynamicTree

_MAX_PENDING_ROWS = 128  # max pending rows processed in one step
_MAX_PENDING_STEPS = 32  # max steps to defer
_ENTRIES_FROM = 64  # min rows besides the last ones for which computing only entries is faster


@dataclass(frozen=True)
class Roots:
    """Roots of B requests' trees: the drafter's states at their last exact entries."""

    normed: Tensor  # [B, H], input of its LM head
    hidden: Tensor  # [B, H], input of its next step; for MTP the same
    ends: Tensor  # int64 [B], number of exact entries
    longest: int  # upper bound of `ends`
    block_table: Tensor  # int32 [B, blocks]


class EagleTrees:
    """A `drafter.Drafter`: mixin for classes with a drafter's module and attention groups."""

    vllm_config: Any
    model: Any  # vLLM's module
    method: str
    beam: Beam
    draft_attn_groups: Sequence[Any]  # of its layers; empty before the KV cache exists
    block_size: int  # of its KV cache group
    tree = None
    target_ids: Tensor | None = None  # int64 [V_draft]; None: same vocabulary
    kernel: EagleBeam | None = None  # for few rows on CPUs
    pool: TreeTensors | None = None  # of P-EAGLE
    mask: tuple[int, Tensor] | None = None  # token and state [1, H] of its deeper levels' entries
    _entry_layer: EntryLayer | None = None
    _known_cache: EagleCache | None = None

    @property
    def scratch(self) -> int:
        """KV slots after a request's tokens that drafting uses."""
        return scratch_of(self.beam)

    def prepare(self) -> None:
        """Check the loaded drafter, and set the attributes that drafting needs.

        Raises HeadsError: a weight holds NaN or infinity.
        """
        for name, weight in self.model.named_parameters():
            if not is_finite(weight):
                raise HeadsError(
                    f"the drafter's {name!r} holds NaN or infinity: its training diverged, or its "
                    "values are too large for the engine's dtype. Retrain it, or use bfloat16 or "
                    "float32"
                )
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        if offsets is not None:
            self.target_ids = torch.arange(len(offsets), device=offsets.device) + offsets
        self._entry_layer = entry_layer(self.model)
        options = TreeSettings.of(self.vllm_config)
        assert options.heads is not None and isinstance(options.tree, DynamicTree)
        if not isinstance(options.tree.pool, Beam):
            token, state = mask_entry(options.heads, options.revision)
            own = self.model.lm_head.weight
            with torch.inference_mode():
                state = self.model.combine_hidden_states(state.to(own.device, own.dtype)[None])
            self.mask, self.pool = (token, state), tensors_on(options.tree.pool, own.device)
            return
        weights = None if self.method != "eagle3" else eagle_weights(self.model, self.target_ids)
        if weights is not None and EagleBeam.serves(weights, self.beam):
            dtype = self.vllm_config.speculative_config.draft_model_config.hf_config.dtype
            self.kernel = EagleBeam(weights, exact=str(dtype).endswith("float32"))  # as stored

    @property
    def enters(self) -> bool:
        """Whether `enter` is possible."""
        names = [name for group in self.draft_attn_groups for name in group.layer_names]
        if len(names) != 1:
            return False
        layer = self.vllm_config.compilation_config.static_forward_context[names[0]]
        backend = layer.attn_backend
        return not backend.is_mla() and not backend.forward_includes_kv_cache_update

    @torch.inference_mode()
    def enter(self, tokens: Tokens) -> None:
        """Compute only the cache entries of tokens.

        Without metadata vLLM's attention writes its entries and returns; EAGLE-3's layer is not run
        beyond them either.
        """
        features, layer = tokens.features, self._entry_layer
        if self.method == "eagle3":
            features = self.model.combine_hidden_states(features)
        if layer is None:
            self._forward(None, tokens.next_ids, tokens.positions, features, slots=tokens.slots)
            return
        embeds = self.model.embed_input_ids(tokens.next_ids)
        key, value = layer.keys_and_values(tokens.positions, embeds, features)
        with self._context(None, len(features), tokens.slots):
            unified_kv_cache_update(key, value, layer.layer.self_attn.attn.layer_name)

    @torch.inference_mode()
    def prefill(self, paths: AcceptedPaths, *, drafts: bool = True) -> Roots | None:
        """Compute the exact cache entries of the accepted tokens.

        Returns the roots after them, or None if they are not needed: not ``drafts``.
        """
        others = len(paths.tokens.positions) - len(paths.ends)
        if (not drafts or (self._entry_layer and others >= _ENTRIES_FROM)) and self.enters:
            self.enter(paths.tokens)
            if not drafts:
                return None
            paths = paths.ending()
        tokens, common, last = paths.tokens, paths.common, paths.last
        features, positions = tokens.features, tokens.positions
        table, longest = common.block_table_tensor, common.max_seq_len
        if len(features) == len(last) and self.kernel is not None:  # one token of each request
            row = np.arange(len(last))
            rows = np.stack([row, np.ones_like(row), positions.numpy()])
            given = tokens.next_ids, tokens.next_ids, [features], table, longest
            if (roots := self.prefill_on_host(rows, None, *given)) is not None:
                return roots
        if self.method == "eagle3":
            features = self.model.combine_hidden_states(features)
        normed, hidden = self._forward(common, tokens.next_ids, positions, features)
        return Roots(normed[last], hidden[last], paths.ends, longest, table)

    @torch.inference_mode()
    def prefill_on_host(
        self,
        rows: np.ndarray,
        path: Path | None,
        input_ids: Tensor,
        next_tokens: Tensor,
        features: Sequence[Tensor],
        block_table: Tensor,  # int32 [B, blocks]
        longest: int,  # upper bound of tokens per request
    ) -> Roots | None:
        """`prefill` by the CPU kernel, see `EagleBeam.prefill`; None if it does not serve it."""
        counts = rows[1] if path is None else rows[1] + path.num_accepted.numpy()
        cache = self._cache(int(counts.sum()))
        if cache is None or self.kernel is None:
            return None
        nodes = None if path is None else (path.nodes, path.num_accepted)
        given = rows, nodes, input_ids, next_tokens, features
        normed, hidden = self.kernel.prefill(cache, block_table, *given)
        dtype, ends = features[0].dtype, torch.from_numpy(rows[2] + counts)
        return Roots(normed.to(dtype), hidden.to(dtype), ends, longest, block_table)

    @torch.inference_mode()
    def draft(
        self,
        states: Roots,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
        min_survival: float | None = None,
        stream: Stream | None = None,
    ) -> DraftTrees:
        """See `drafter.Drafter`; runs all levels."""
        noise = None
        if stream is not None:
            ids = self.target_ids
            if ids is None:
                ids = torch.arange(
                    self.vllm_config.model_config.get_vocab_size(), device=root.device
                )
            noise = Noise(stream, ids)
        beam = self.beam.within(num_nodes if limit is None else limit)
        cache = self._cache(len(root) * beam.width)
        if cache is not None and self.kernel is not None:
            levels = None if noise is None else noise.at(0, beam.depth)
            call = beam_call(self.beam, root, num_nodes, max_depth, limit, levels)
            given = states.block_table, states.normed, states.hidden, states.ends
            found = self.kernel.draft(cache, *given, call)
            return found or DraftTrees.roots(len(root), num_nodes, root.device)
        if self.pool is not None:
            parallel = _Levels(self, states, max_depth > 0, noise)
            return build_tree(parallel, self.pool, root, num_nodes, max_depth, limit)
        branches = _Branches(self, states, max_depth > 0, noise)
        return build_tree(branches, self.beam, root, num_nodes, max_depth, limit)

    def choices(self, normed: Tensor, width: int, noise: LevelNoise | None) -> Choices:
        """The best tokens after states [B, k, H] of one level."""
        rows = normed.flatten(0, 1)
        if self.method == "mtp":
            logits = self.model.compute_logits(rows)
        else:  # EAGLE-3's `compute_logits` adds the tokens that are not in its vocabulary
            logits = self.model.logits_processor(self.model.lm_head, rows)
        logits = logits.float().unflatten(0, normed.shape[:2])  # [B, k, V_draft]
        return read_choices(logits, width, noise=noise, token_map=self.target_ids)

    def in_scratch(
        self,
        roots: Roots,
        used: Tensor,  # bool [B], requests with slots; the others get none, and no context
        size: int,  # entries of each request after its exact ones, with these
        token_ids: Tensor,  # int64 [B, k]
        offsets: Tensor,  # int64 [k], their positions after the exact entries
        hidden: Tensor,  # [B, k, H]
        branches: tuple[Tensor, Tensor] | None = None,  # bool [B, k, size], int64 [size]; see below
    ) -> tuple[Tensor, Tensor]:
        """Normed and hidden states [B, k, H] of the last k entries after the exact ones.

        ``branches``: the entries that each one attends to, and their positions after the exact
        ones. None: all before it, and itself.
        """
        (batch, count), device = token_ids.shape, token_ids.device
        ends = torch.where(used, roots.ends, 0)
        nodes = torch.arange(size - count, size, device=device)
        requests = torch.arange(batch, device=device)[:, None]
        slots = self.slots(roots.block_table, requests, ends[:, None] + nodes)
        starts = 0, (batch + 1) * count, count
        common = CommonAttentionMetadata(
            query_start_loc=torch.arange(*starts, dtype=torch.int32, device=device),
            query_start_loc_cpu=torch.arange(*starts, dtype=torch.int32),
            seq_lens=(ends + size).to(torch.int32),
            num_reqs=batch,
            num_actual_tokens=batch * count,
            max_query_len=count,
            max_seq_len=roots.longest + size,
            block_table_tensor=roots.block_table,
            slot_mapping=torch.where(used[:, None], slots, NO_SLOT).flatten(),
        )
        given = None if branches is None else (branches[0], ends, branches[1])
        positions = (ends[:, None] + offsets).flatten()
        states = self._forward(common, token_ids.flatten(), positions, hidden.flatten(0, 1), given)
        normed, hidden = (state.unflatten(0, (batch, count)) for state in states)
        return normed, hidden

    def _forward(
        self,
        common: CommonAttentionMetadata | None,  # None: no attention
        token_ids: Tensor,  # [T]
        positions: Tensor,  # int64 [T]
        hidden: Tensor,  # [T, H]
        branches: tuple[Tensor, ...] | None = None,  # see `build_branches`; None: a chain
        slots: Tensor | None = None,  # int64 [T]; None: those of ``common``
    ) -> tuple[Tensor, Tensor]:
        with self._context(common, len(hidden), slots, branches):
            states = self.model(
                input_ids=token_ids.to(torch.int32),
                positions=positions,
                hidden_states=hidden,
                inputs_embeds=None,
            )
        return states if isinstance(states, tuple) else (states, states)

    def _context(
        self,
        common: CommonAttentionMetadata | None,
        rows: int,
        slots: Tensor | None,
        branches: tuple[Tensor, ...] | None = None,
    ) -> AbstractContextManager[None]:
        """A forward context of vLLM; arguments as in `_forward`."""
        metadata: dict[str, Any] = {}
        if slots is None and common is not None:
            slots = common.slot_mapping
        by_layer: dict[str, Tensor | None] = {}
        for group in self.draft_attn_groups:
            by_layer |= dict.fromkeys(group.layer_names, slots)
            if common is None:
                continue
            builder = group.get_metadata_builder()
            if branches is None:
                built = builder.build(0, common)
            else:
                built = builder.build_branches(common, *branches)
            metadata |= dict.fromkeys(group.layer_names, built)
        context: AbstractContextManager[None] = set_forward_context(
            metadata or None,  # no cache in vLLM's memory profiling
            self.vllm_config,
            num_tokens=rows,
            slot_mapping=by_layer or None,
        )
        return context

    def _cache(self, rows: int) -> EagleCache | None:
        """The layer's cache for the kernel; None if it does not serve this many rows."""
        if self.kernel is None or rows > MAX_ROWS or not self.draft_attn_groups:
            return None
        ((name,),) = (group.layer_names for group in self.draft_attn_groups)
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        known = self._known_cache
        if known is None or known.tensor is not layer.kv_cache:
            known = self._known_cache = eagle_cache(layer)
        return known

    def slots(self, block_table: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
        """Cache slots, int64, of positions (int64) of requests (int64), which broadcast."""
        blocks = positions // self.block_size
        return positions + (block_table[requests, blocks] - blocks) * self.block_size


class PendingTokens:
    """Tokens of plain steps, run through the drafter many at a time.

    A plain step adds one token per request. Its cache entries are needed only when the drafter
    drafts next, or when other requests run, which may share them as a prefix. They are written
    before other requests reuse their slots, also for the target's layers (`before_step`).
    """

    def __init__(self, drafter: EagleTrees) -> None:
        self._drafter = drafter
        self._requests: list[str] = []
        self._table: Tensor | None = None  # int32 [B, blocks], of the latest step
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # see `add`

    def add(
        self,
        requests: Sequence[str],
        ends: Tensor,  # integer [B], each request's number of tokens with a cache entry
        next_tokens: Tensor,  # integer [B]
        features: Sequence[Tensor],  # [>= B, H] each, hidden states of the target
        block_table: Tensor,  # int32 [B, blocks]
    ) -> None:
        """Defer a plain step's tokens; the drafter must be one that `enters`. Copies tensors."""
        if self._requests != requests:
            self.flush()
            self._requests = list(requests)
        count = len(requests)
        states = torch.cat([state[:count] for state in features], -1)
        self._steps.append((ends.clone(), next_tokens.clone(), states))
        self._table = block_table.clone()
        depth = len(self._steps)
        if depth >= _MAX_PENDING_STEPS or depth * count >= _MAX_PENDING_ROWS:
            self.flush()

    def before_step(self, scheduled: SchedulerOutput) -> None:
        """Flush before the target runs if a request does not continue: its blocks may be reused.

        With several KV cache groups (sliding windows), by the target's layers.
        """
        if not self._steps:
            return
        cached = scheduled.scheduled_cached_reqs
        if not ({*cached.req_ids} - cached.resumed_req_ids).issuperset(self._requests):
            self.flush()

    def flush(self) -> None:
        """Compute the entries of all pending tokens."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        ends, next_ids, features = (torch.cat(values) for values in zip(*steps, strict=True))
        positions = ends.to(torch.int64) - 1
        assert self._table is not None
        requests = torch.arange(len(self._table), device=ends.device).repeat(len(steps))
        slots = self._drafter.slots(self._table, requests, positions)
        self._drafter.enter(Tokens(next_ids, positions, slots, features))


class _Branches:
    """The drafter at one step of B requests; see `build.Branching`.

    Requests that are not ``used`` (bool [B]) get no slots and no context: there may be no free
    slots after their tokens.
    """

    def __init__(
        self, drafter: EagleTrees, roots: Roots, used: Tensor, noise: Noise | None
    ) -> None:
        self.drafter, self.roots, self.used, self.noise = drafter, roots, used, noise
        self.hidden = roots.hidden.unsqueeze(1)  # [B, k, H] of the latest level
        empty = roots.ends.new_zeros((len(roots.ends), 1, 0), dtype=torch.bool)
        self.ancestors = empty  # [B, k, S], which scratch nodes each node of the level attends to
        self.depths = roots.ends.new_zeros(0)  # [S], position after the exact entries

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """The choices below nodes; the roots' own states are already exact."""
        normed, count = self.roots.normed.unsqueeze(1), tokens.shape[1]
        if level > 0:
            own = torch.eye(count, dtype=torch.bool, device=tokens.device)
            own = own.expand(len(tokens), -1, -1)
            self.ancestors = torch.cat([_of_parents(self.ancestors, parents), own], 2)
            offsets = self.depths.new_full((count,), level - 1)
            self.depths = torch.cat([self.depths, offsets])
            size = self.ancestors.shape[2]
            branches = (self.ancestors, self.depths) if size > level else None  # None: a chain
            above = _of_parents(self.hidden, parents)
            normed, self.hidden = self.drafter.in_scratch(
                self.roots, self.used, size, tokens, offsets, above, branches
            )
        noise = None if self.noise is None else self.noise.at(level, level + 1)
        return self.drafter.choices(normed, width, noise)


class _Levels:
    """A P-EAGLE drafter at one step of B requests, used as in `_Branches`; see `build.Marginal`."""

    def __init__(
        self, drafter: EagleTrees, roots: Roots, used: Tensor, noise: Noise | None
    ) -> None:
        self.drafter, self.roots, self.used, self.noise = drafter, roots, used, noise

    def marginals(self, depth: int, width: int) -> Choices:
        """The choices of all levels; those of the first are the roots' own."""
        roots, normed, count = self.roots, self.roots.normed.unsqueeze(1), depth - 1
        if count:
            assert self.drafter.mask is not None
            token, state = self.drafter.mask
            tokens = roots.ends.new_full((len(roots.ends), count), token)
            offsets = torch.arange(count, device=tokens.device)
            states = state.expand(len(tokens), count, -1)
            below, _ = self.drafter.in_scratch(roots, self.used, count, tokens, offsets, states)
            normed = torch.cat([normed, below], 1)
        noise = None if self.noise is None else self.noise.at(0, depth)
        return self.drafter.choices(normed, width, noise)


def _of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """Gather the parents' rows: [B, k, n] of the level above, int64 [B, k'] -> [B, k', n]."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[2]))
