"""What an EAGLE drafter's trees were made of, beside a dense forward pass of every node's path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from support.eagle import Eagle3
from vllm_medusa.proposer.candidates import Choices
from vllm_medusa.scorer.layout import gather_tokens
from vllm_medusa.worker.v1 import eagle
from vllm_medusa.worker.v1.eagle_runner import EagleModelRunner
from vllm_medusa.worker.v1.topologies import Topologies


@dataclass
class Grown:
    """One step's trees of some requests."""

    ends: Tensor  # int64 [B]
    levels: list[tuple[Tensor, Tensor, Choices]] = field(default_factory=list)
    keys: Tensor | None = None  # of the first request, exact entries and scratch [T, heads, D]
    values: Tensor | None = None
    tokens: list[list[int]] = field(default_factory=list)  # all of each request


@contextmanager
def recorded_trees(every: int) -> Iterator[list[Grown]]:
    """Collect the trees of every so many steps that draft."""
    kept: list[Grown] = []
    grow, expand = eagle.EagleTreeDrafter.grow, eagle._Branches.expand
    grow_all, keep = EagleModelRunner._grow, Topologies.keep
    runner: list[Any] = []
    latest: list[Grown] = []
    count = 0

    def of_runner(self: Any, *args: Any) -> Any:
        runner[:] = [self]
        return grow_all(self, *args)

    def growing(self: Any, roots: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        latest[:] = [Grown(roots.ends.clone())]
        proposal = grow(self, roots, *args)
        if count % every == 0:
            (grown,) = latest
            (name,) = self.layer_names
            layer = self.vllm_config.compilation_config.static_forward_context[name]
            scratch = sum(tokens.shape[1] for tokens, _, _ in grown.levels[1:])
            places = torch.arange(int(roots.ends[0]) + scratch)
            slots = self._slots(roots.block_table[:1], places[None])[0]
            grown.keys, grown.values = gather_tokens(layer.kv_cache, layer.isa, slots)
            kept.append(grown)
        return proposal

    def expanding(self: Any, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        choices = expand(self, level, tokens, parents, width)
        latest[0].levels.append((tokens.clone(), parents.clone(), choices))
        return choices

    def keeping(self: Any, req_ids: Any, *args: Any) -> None:
        requests = [runner[0].requests[req_id] for req_id in req_ids]
        latest[0].tokens = [[*r.prompt_token_ids, *r.output_token_ids] for r in requests]
        keep(self, req_ids, *args)

    patched = (
        (eagle.EagleTreeDrafter, "grow", growing),
        (eagle._Branches, "expand", expanding),
        (EagleModelRunner, "_grow", of_runner),
        (Topologies, "keep", keeping),
    )
    for owner, name, function in patched:
        setattr(owner, name, function)
    try:
        yield kept
    finally:
        eagle.EagleTreeDrafter.grow, eagle._Branches.expand = grow, expand
        EagleModelRunner._grow, Topologies.keep = grow_all, keep


def assert_dense(grown: Grown, drafter: Eagle3, model: Any) -> int:
    """All guesses, keys and values of the first request are those of dense forward passes."""
    tokens, end = torch.tensor(grown.tokens[0]), int(grown.ends[0])
    assert len(tokens) == end + 1
    features = drafter.features(model, tokens[None, :end])[0]
    assert grown.keys is not None and grown.values is not None
    paths: list[list[int]] = [[]]
    slot, checked = end, 0
    for level, (nodes, parents, choices) in enumerate(grown.levels):
        if level > 0:
            pairs = zip(nodes[0].tolist(), parents[0].tolist(), strict=True)
            paths = [[*paths[parent], token] for token, parent in pairs]
        for place, path in enumerate(paths):
            logits, (keys, values) = drafter.dense(tokens[1:], features, path)
            wanted = logits.log_softmax(-1).topk(choices.token_ids.shape[2])
            found = choices.log_confidence[0, place]
            torch.testing.assert_close(found, wanted.values, atol=2e-3, rtol=1e-3)
            ids = drafter.target_ids[wanted.indices]
            if (wanted.values[:-1] - wanted.values[1:]).min() > 1e-2:
                torch.testing.assert_close(choices.token_ids[0, place], ids)
            for mine, dense in ((grown.keys, keys[0]), (grown.values, values[0])):
                dense = dense.transpose(0, 1)  # [T, heads, D]
                if level == 0:
                    torch.testing.assert_close(mine[:end], dense, atol=2e-3, rtol=1e-3)
                else:
                    torch.testing.assert_close(mine[slot], dense[-1], atol=2e-3, rtol=1e-3)
            slot += level > 0
            checked += 1
    return checked
