"""Record what an EAGLE drafter's trees were built from, to compare with dense forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from support.after_drafting import Drafted, after_drafting
from support.attention import gather_tokens
from support.eagle import Eagle3
from support.runner import ON_V2
from vllm_medusa.integration.drafters import eagle_trees
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees
from vllm_medusa.noise import SCALE, WEIGHT, splitmix_gumbel
from vllm_medusa.proposer.choices import Choices


@dataclass
class Grown:
    """One step's trees of some requests."""

    row: int  # of the inspected request
    end: int  # its exact entries
    levels: list[tuple[Tensor, Tensor, Choices]] = field(default_factory=list)
    keys: Tensor | None = None  # exact entries and scratch [T, heads, D]
    values: Tensor | None = None
    request: Drafted | None = None

    def with_noise(self, logits: Tensor, level: int, token_ids: Tensor) -> Tensor:
        """Logits [V_draft] at a level, with the noise of the request's seed at that position."""
        assert self.request is not None
        params, count = self.request.params, len(self.request.output)
        if not params.temperature:
            return logits
        temperature = params.temperature
        if ON_V2:
            from vllm_medusa.integration.v2.kernel import HashedNoise

            last = len(self.request.prompt) + count - 1
            given = (torch.tensor([value]) for value in (params.seed, 0, last, temperature))
            gumbel = HashedNoise(*given).gumbel(level, level + 1, token_ids)[0, 0]
        else:  # one draw for each token
            generator = torch.Generator().manual_seed(params.seed)
            seeds = torch.randint(0, 2**31, (count + level + 1,), generator=generator)
            gumbel = splitmix_gumbel(seeds[-1:], token_ids).float()
        scale = min(SCALE / temperature, 1.0)
        return scale * logits + scale * temperature * WEIGHT * gumbel


@contextmanager
def recorded_trees(every: int) -> Iterator[list[Grown]]:
    """Record the trees of every n-th step that drafts; level by level, without the kernel."""
    kept: list[Grown] = []
    draft, expand = EagleTrees.draft, eagle_trees._Branches.expand
    marginals = eagle_trees._Levels.marginals
    latest: list[Grown] = []
    count = 0

    def growing(
        self: Any, roots: Any, root: Tensor, num_nodes: int, depth: Tensor, *more: Any
    ) -> Any:
        nonlocal count
        useful = [row for row, useful_depth in enumerate(depth.tolist()) if useful_depth > 0]
        row = useful[0] if useful else 0
        latest[:] = [Grown(row, int(roots.ends[row]))]
        with torch_only(self):
            proposal = draft(self, roots, root, num_nodes, depth, *more)
        count += bool(useful)
        if useful and count % every == 0:
            (grown,) = latest
            ((name,),) = (group.layer_names for group in self.draft_attn_groups)
            layer = self.vllm_config.compilation_config.static_forward_context[name]
            scratch = sum(tokens.shape[1] for tokens, _, _ in grown.levels[1:])
            places = torch.arange(grown.end + scratch)
            slots = self.slots(roots.block_table, torch.tensor(row), places)
            grown.keys, grown.values = cached(layer, slots)
            kept.append(grown)
        return proposal

    def expanding(self: Any, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        choices = expand(self, level, tokens, parents, width)
        latest[0].levels.append((tokens.clone(), parents.clone(), choices))
        return choices

    def all_levels(self: Any, depth: int, width: int) -> Choices:
        choices = marginals(self, depth, width)
        one = choices.token_ids.new_zeros((len(choices.token_ids), 1))
        for level in range(depth):
            own = slice(level, level + 1)
            own_choices = Choices(choices.token_ids[:, own], choices.log_confidence[:, own])
            latest[0].levels.append((one, one, own_choices))
        return choices

    def noting(request: Drafted) -> None:
        if latest and request.row == latest[0].row:
            latest.pop().request = request

    with pytest.MonkeyPatch.context() as patch, after_drafting(noting):
        patch.setattr(EagleTrees, "draft", growing)
        patch.setattr(eagle_trees._Branches, "expand", expanding)
        patch.setattr(eagle_trees._Levels, "marginals", all_levels)
        yield kept


@contextmanager
def torch_only(drafter: EagleTrees) -> Iterator[None]:
    """Without the kernel for CPUs."""
    kernel, drafter.kernel = drafter.kernel, None
    try:
        yield
    finally:
        drafter.kernel = kernel


def cached(layer: Any, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in a layer's cache, [T, heads, D].

    Those of MLA are latents, and rotated channels, in transformers' order: halves, not pairs.
    """
    if layer.kv_cache.dim() == 3:
        both = layer.kv_cache.flatten(0, 1)[slots].unsqueeze(1)
        latents, rotated = both.tensor_split([layer.kv_lora_rank], -1)
        return latents, rotated.unflatten(-1, (-1, 2)).mT.flatten(-2)
    if hasattr(layer, "isa"):
        return gather_tokens(layer.kv_cache, layer.isa, slots)
    keys, values = layer.kv_cache.transpose(1, 2).split(layer.head_size, -1)
    return keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]


def assert_dense(grown: Grown, drafter: Eagle3, model: Any) -> int:
    """All drafts, keys and values of the request equal those of dense forward passes."""
    assert grown.request is not None
    tokens = torch.tensor([*grown.request.prompt, *grown.request.output])
    end, row = grown.end, grown.row
    assert len(tokens) == end + 1
    features = drafter.features(model, tokens[None, :end])[0]
    assert grown.keys is not None and grown.values is not None
    paths: list[list[int]] = [[]]
    slot, checked = end, 0
    first = 0 if drafter.window is None else max(0, end - drafter.window + 1)  # not freed
    for level, (nodes, parents, choices) in enumerate(grown.levels):
        if level > 0:
            pairs = zip(nodes[row].tolist(), parents[row].tolist(), strict=True)
            paths = [[*paths[parent], token] for token, parent in pairs]
        for place, path in enumerate(paths):
            logits, (keys, values) = drafter.dense(tokens[1:], features, path)
            logits = grown.with_noise(logits, level, drafter.target_ids)
            wanted = logits.log_softmax(-1).topk(choices.token_ids.shape[2])
            found = choices.log_confidence[row, place]
            torch.testing.assert_close(found, wanted.values, atol=2e-3, rtol=1e-3)
            ids = drafter.target_ids[wanted.indices]
            if (wanted.values[:-1] - wanted.values[1:]).gt(1e-2).all():
                torch.testing.assert_close(choices.token_ids[row, place], ids)
            for mine, dense in ((grown.keys, keys[0]), (grown.values, values[0])):
                dense = dense.transpose(0, 1)  # [T, heads, D]
                if level == 0:
                    torch.testing.assert_close(mine[first:end], dense[first:], atol=2e-3, rtol=1e-3)
                else:
                    torch.testing.assert_close(mine[slot], dense[-1], atol=2e-3, rtol=1e-3)
            slot += level > 0
            checked += 1
    return checked
