"""Inspect and change what each step of an engine drafted, on both model runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from support.runner import ON_V2
from vllm_medusa.tree import TokenTree


@dataclass(frozen=True)
class Drafted:
    """A request that received tokens in a step, and what was drafted for it."""

    row: int  # in the batch
    prompt: list[int]
    output: list[int]
    params: Any
    num_nodes: int  # of the tree that the step verified, root included; 1: a plain step
    path: list[int]  # accepted nodes, root first
    new: list[int]  # tokens of the step
    drafts: list[int]
    tree: TokenTree | None  # of the drafts; None: there are none


Look = Callable[[Drafted], Sequence[int] | None]  # returns other drafts, or None to keep them


@contextmanager
def after_drafting(look: Look) -> Iterator[None]:
    """Within the block, call ``look`` for every request that received tokens in a step."""
    with (_on_v2 if ON_V2 else _on_v1)(look):
        yield


@contextmanager
def _on_v1(look: Look) -> Iterator[None]:
    from vllm_medusa.integration.v1.runner import MedusaModelRunner

    original = MedusaModelRunner._propose

    def propose(self: Any, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        step, verdict = self.trees.step, self.trees.verdict
        drafts = original(self, scheduler_output, sampled, *args, **kwargs)
        for row, req_id in enumerate(self.input_batch.req_ids):
            if not sampled[row]:
                continue
            request, count = self.requests[req_id], len(drafts[row])
            given = look(
                Drafted(
                    row,
                    list(request.prompt_token_ids or ()),  # empty if it was given as embeddings
                    list(request.output_token_ids),
                    request.sampling_params,
                    1 if step is None else int(step.num_nodes[row]),
                    [0] if step is None else _path(verdict, row),
                    list(sampled[row]),
                    list(drafts[row]),
                    _tree(self.trees, self._slots[req_id], count),
                )
            )
            if given is not None:
                drafts[row] = list(given[:count])
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MedusaModelRunner, "_propose", propose)
        yield


@contextmanager
def _on_v2(look: Look) -> Iterator[None]:
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_medusa.integration.v2.speculator import TreeSpeculator

    add_requests, original = GPUModelRunner.add_requests, TreeSpeculator.propose
    requests: dict[str, Any] = {}
    runner: list[Any] = []  # the runner whose speculator proposes

    def add(self: Any, scheduler_output: Any) -> None:
        runner[:] = [self]
        requests.update((new.req_id, new) for new in scheduler_output.scheduled_new_reqs)
        add_requests(self, scheduler_output)

    def propose(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step, verdict = self.trees.step, self.trees.verdict
        drafts = original(self, batch, *args, **kwargs)
        for row, (req_id, new) in enumerate(zip(batch.req_ids, args[4].tolist(), strict=False)):
            if not new or req_id not in requests:
                continue
            states, slot = runner[0].req_states, batch.idx_mapping_np[row]
            prompt, end = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
            tokens, count = states.all_token_ids.gpu[slot, :end].tolist(), drafts.shape[1]
            if self.trees.static is None:
                count = 0 if self._drafts is None else int(self._drafts.num_nodes[row]) - 1
            given = look(
                Drafted(
                    row,
                    tokens[:prompt],
                    tokens[prompt:],
                    requests[req_id].sampling_params,
                    1 if step is None else int(step.num_nodes[row]),
                    [0] if verdict is None else _path(verdict, row),
                    tokens[end - new :],
                    drafts[row].tolist(),
                    _tree(self.trees, slot, count),
                )
            )
            if given is not None:
                drafts[row, : len(given)] = torch.tensor(given)
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPUModelRunner, "add_requests", add)
        patch.setattr(TreeSpeculator, "propose", propose)
        yield


def _path(verdict: Any, row: int) -> list[int]:
    path = verdict.path
    return path.nodes[row, : int(path.num_accepted[row]) + 1].tolist()


def _tree(trees: Any, slot: int, count: int) -> TokenTree | None:
    """The tree of a request's ``count`` drafts; a child's rank is its index among its siblings."""
    if count == 0:
        return None
    if trees.static is not None:
        return trees.options.tree
    parents = trees.parents[slot, 1 : 1 + count].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent], parents[:node].count(parent)))
    return TokenTree(tuple(paths[1:]))
