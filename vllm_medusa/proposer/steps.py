"""Medusa and Hydra heads at one step, as called by `proposer.build`, and a step's drafts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.heads.cpu import PackedHeads
from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.noise import Noise, Stream
from vllm_medusa.proposer.build import build_tree, fill_tree, source_on
from vllm_medusa.proposer.choices import Choices, ReadChoices, read_choices
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import DynamicTree
from vllm_medusa.tree.topology import MAX_NODES, TokenTree

Embed = Callable[[Tensor], Tensor]  # int64 [..] -> [.., H], the target's embedding, unscaled


@dataclass(frozen=True, eq=False)
class MedusaStep:
    """Medusa heads at one step of B requests; see `build.Marginal`."""

    heads: MedusaHeads | PackedHeads
    hidden_states: Tensor  # [B, H], the target's last, after its final norm
    lm_head: LMHead | None = None  # the target's, for heads that share it
    sharpness: Tensor | None = None  # float32 [>= D], factors on each head's logits; None: 1
    read: ReadChoices | None = None  # None: the logits cover the whole vocabulary
    noise: Noise | None = None  # None: the requests do not sample
    stages: Stages | None = None  # None: all heads run at once
    useful: Tensor | None = None  # int64 [B], as for `Stages.choices`
    min_survival: float = 0.0  # as for `Stages.choices`

    def marginals(self, depth: int, width: int) -> Choices:
        """See `build.Marginal`."""
        if self.stages is None or self.useful is None:
            return self.choices(depth, width)
        return self.stages.choices(self.choices, depth, width, self.useful, self.min_survival)

    def choices(self, depth: int, width: int, first: int = 0) -> Choices:
        """The choices of heads ``first`` to ``depth`` - 1 (packed heads)."""
        sharpness = None if self.sharpness is None else self.sharpness[first:]
        read = self.read or functools.partial(read_choices, token_map=self.heads.token_map)
        noise = None if self.noise is None else self.noise.at(first, depth)
        return read(self.logits(depth, first), width, sharpness, noise)

    def logits(self, depth: int, first: int = 0) -> Tensor:
        """[B, depth - first, V_draft] of the same heads."""
        start = (first,) if first else ()
        states = self.heads(self.hidden_states, depth, *start)
        return self.heads.compute_logits(states, self.lm_head, *start)


class HydraStep:
    """Hydra heads at one step of B requests: head i scores the tokens after each node of depth i.

    See `build.Branching`.
    """

    def __init__(
        self,
        heads: HydraHeads | PackedHydra,
        hidden_states: Tensor,  # [B, H], as for `MedusaStep`
        embed: Embed,
        lm_head: LMHead | None = None,
        sharpness: Tensor | None = None,  # as for `MedusaStep`
        read: ReadChoices | None = None,
        noise: Noise | None = None,  # as for `MedusaStep`
    ) -> None:
        self._heads, self._embed, self._lm_head, self._noise = heads, embed, lm_head, noise
        self._sharpness = sharpness
        self._read = read or functools.partial(read_choices, token_map=heads.token_map)
        self._seen = hidden_states.unsqueeze(1)  # [B, k, (level + 1) * H] inputs for the nodes

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """See `build.Branching`."""
        batch, nodes = tokens.shape
        above = self._seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, self._seen.shape[2]))
        self._seen = torch.cat([above, self._embed(tokens).to(above)], -1)
        x = self._heads.level(level, self._seen.flatten(0, 1)).unsqueeze(1)  # [B * k, 1, H]
        logits = self._heads.compute_logits(x, self._lm_head, level).squeeze(1)
        logits = logits.unflatten(0, (batch, nodes))
        factors = None if self._sharpness is None else self._sharpness[level].expand(nodes)
        noise = None if self._noise is None else self._noise.at(level, level + 1)
        return self._read(logits, width, factors, noise)


MIN_SURVIVAL = 0.15  # min survival of the likeliest draft for deeper heads to run
FIRST_HEADS = 2  # heads that always run
_WINDOW = 32.0  # steps over which the rate of needed deep heads is averaged


class Stages:
    """Runs deep heads only when some draft is likely enough to reach them; syncs with the host.

    The gain of deep heads is bounded by the survival at their depth. A second run may read an LM
    head again, which can be larger than all other weights of the heads; so all heads run at once
    if deep ones are needed often. All ranks decide identically.
    """

    def __init__(self, own: int, again: int) -> None:
        """``own`` weights are read per head, ``again`` per run."""
        self._own, self._again = own, again
        self._needed = 0.0  # fraction of recent steps that needed deep heads

    def choices(
        self,
        run: Callable[[int, int, int], Choices],  # `MedusaStep.choices`
        depth: int,
        width: int,
        useful: Tensor,  # int64 [B], max useful depth per request
        min_survival: float,  # drafts with less are ignored
    ) -> Choices:
        """The choices [B, D, width] of the first ``depth`` heads, or of `FIRST_HEADS` if enough."""
        if depth <= FIRST_HEADS:
            return run(depth, width, 0)
        saved = (1.0 - self._needed) * (depth - FIRST_HEADS) * self._own
        whole = saved <= self._needed * self._again
        found = run(depth if whole else FIRST_HEADS, width, 0)
        survival = found.log_confidence[:, :FIRST_HEADS, 0].sum(1).exp()
        needed = bool(((survival >= min_survival) & (useful > FIRST_HEADS)).any())
        self._needed += (needed - self._needed) / _WINDOW
        if whole or not needed:
            return found
        rest = run(depth, width, FIRST_HEADS)
        return Choices(
            torch.cat([found.token_ids, rest.token_ids], 1),
            torch.cat([found.log_confidence, rest.log_confidence], 1),
        )


def propose_tree(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [B, H], at the position whose next token is the root
    root: Tensor,  # int64 [B], the last sampled tokens
    tree: TokenTree | DynamicTree,
    lm_head: LMHead | None = None,
    useful_depth: int = MAX_NODES,  # max depth of dynamic trees
    stream: Stream | None = None,  # the noise of the next tokens, of requests that sample
) -> DraftTrees:
    """Drafts for any kind of tree, for `decode.py`; Hydra heads must have an embedding bound."""
    device = hidden_states.device
    noise = None
    if stream is not None:
        ids = heads.token_map
        ids = torch.arange(heads.vocab_size, device=device) if ids is None else ids
        noise = Noise(stream, ids)
    sharpness = getattr(tree, "sharpness", None)
    factors = None if sharpness is None else torch.tensor(sharpness, device=device)
    step: MedusaStep | HydraStep = MedusaStep(heads, hidden_states, lm_head, factors, noise=noise)
    if isinstance(heads, HydraHeads):
        step = HydraStep(heads, hidden_states, heads.embed, lm_head, factors, noise=noise)
    if isinstance(tree, DynamicTree):
        useful = torch.full((len(root),), useful_depth, device=device)
        return build_tree(step, source_on(tree, device), root, tree.num_nodes, useful)
    return fill_tree(step, tree, root)
