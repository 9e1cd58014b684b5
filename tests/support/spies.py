"""Record the actions of the scheduler and the verifier, so that tests can require mixed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support.engines import Completion
from support.runner import ON_V2


@dataclass
class Row:
    """One request in one step of an engine with trees."""

    prompt: tuple[int, ...]
    computed: int  # tokens in the KV cache before the step
    scheduled: int  # tokens of the step, drafts included
    num_nodes: int  # of the tree, root included; 1: no drafts
    accepted: int = 0

    @property
    def is_tree(self) -> bool:
        return self.num_nodes > 1

    @property
    def is_prefill(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def is_partial_prefill(self) -> bool:
        """A chunk that leaves part of the prompt to a later step."""
        return self.computed + self.scheduled < len(self.prompt)


Step = list[Row]


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Record every step of every engine with trees that runs within the block."""
    steps: list[Step] = []
    with (_recording_on_v2 if ON_V2 else _recording_on_v1)(steps):
        yield steps


@contextmanager
def _recording_on_v1(steps: list[Step]) -> Iterator[None]:
    from vllm_medusa.integration.v1.runner import MedusaModelRunner

    prepare, sample = MedusaModelRunner._prepare_inputs, MedusaModelRunner._sample

    def prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        step: Step = []
        for req_id, scheduled in zip(self.input_batch.req_ids, num_scheduled_tokens, strict=True):
            request = self.requests[req_id]
            prompt, computed = tuple(request.prompt_token_ids), int(request.num_computed_tokens)
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(req_id, ())
            step.append(Row(prompt, computed, int(scheduled), 1 + len(drafts)))
        steps.append(step)
        return prepare(self, scheduler_output, num_scheduled_tokens)

    def sample_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        for row, tokens in zip(steps[-1], output.sampled_token_ids.tolist(), strict=True):
            row.accepted = sum(token >= 0 for token in tokens) - 1
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MedusaModelRunner, "_prepare_inputs", prepare_inputs)
        patch.setattr(MedusaModelRunner, "_sample", sample_step)
        yield


@contextmanager
def _recording_on_v2(steps: list[Step]) -> Iterator[None]:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_medusa.integration.v2.speculator import TreeSpeculator

    original = GPUModelRunner.sample

    def sample(self: Any, hidden_states: Any, batch: Any, *args: Any) -> Any:
        output, num_sampled, num_rejected = original(self, hidden_states, batch, *args)
        if isinstance(self.speculator, TreeSpeculator):
            states, ends = self.req_states, batch.seq_lens.tolist()
            prompts = [
                states.all_token_ids.gpu[slot, : int(states.prompt_len.np[slot])].tolist()
                for slot in batch.idx_mapping_np
            ]
            scheduled = batch.num_scheduled_tokens.tolist()
            nodes, accepted = np.diff(batch.cu_num_logits_np), (num_sampled - 1).clamp_min(0)
            rows = zip(prompts, ends, scheduled, nodes.tolist(), accepted.tolist(), strict=False)
            steps.append([Row(tuple(p), end - n, n, size, k) for p, end, n, size, k in rows])
        return output, num_sampled, num_rejected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPUModelRunner, "sample", sample)
        yield


def tree_rows(steps: Sequence[Step]) -> list[Row]:
    """Every request that verified a tree, step by step."""
    return [row for step in steps for row in step if row.is_tree]


def mixed(steps: Sequence[Step]) -> list[Step]:
    """The steps in which some request verified a tree while another was in its prefill."""
    return [
        step
        for step in steps
        if any(row.is_tree for row in step)
        and any(row.is_prefill and row.scheduled > 1 for row in step)
    ]


def accepted_per_step(steps: Sequence[Step], prompt: Sequence[int]) -> list[int]:
    """Number of drafts accepted by each verification of one request."""
    return [row.accepted for row in tree_rows(steps) if row.prompt == tuple(prompt)]


def assert_reported(
    steps: Sequence[Step], prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> None:
    """vLLM's statistics of each request equal what was scheduled and accepted, step by step.

    The async scheduler may have scheduled one more step before it learns of a request's end.
    """
    for prompt, completion in zip(prompts, completions, strict=True):
        seen = [row for row in tree_rows(steps) if row.prompt == tuple(prompt)]
        end = len(completion.drafted)
        assert len(seen) - end in (0, 1)
        assert tuple(row.num_nodes - 1 for row in seen[:end]) == completion.drafted
        assert tuple(row.accepted for row in seen[:end]) == completion.accepted


def mean_accepted(steps: Sequence[Step]) -> float:
    """Accepted drafts per verified tree; tau is one more."""
    rows = tree_rows(steps)
    return sum(row.accepted for row in rows) / len(rows)
