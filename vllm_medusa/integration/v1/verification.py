"""Verification of a step's trees with vLLM's own sampler.

The lossless walk calls the engine's `Sampler` for one token per request and level, with the
request's real parameters and the history that plain decoding would have there. So everything that a
token's distribution depends on (temperature, truncation, penalties, bad words, allowed tokens,
min_tokens, the request's seed) is as in plain decoding, and a generator advances once per token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_medusa.integration.requests import TypicalRule
from vllm_medusa.integration.v1.history import PathHistory, has_budgets, one_row_each
from vllm_medusa.integration.v1.sampler import GuidedSampler
from vllm_medusa.integration.v1.typical import typical_paths
from vllm_medusa.sampler import NO_TOKEN, Verdict, greedy_walk, lossless_walk
from vllm_medusa.scorer.step import TreeStep


def verify(
    sampler: GuidedSampler,  # the engine's
    logits: Tensor,  # [sum of num_nodes, V], the target's at every node; not modified
    step: TreeStep | None,  # None: plain sampling without a verdict
    metadata: SamplingMetadata,  # of the B requests
    typical: TypicalRule | None,
) -> tuple[Verdict | None, SamplerOutput]:
    """Decide every request's path and tokens, in place of vLLM's rejection sampler.

    Returns the verdict, and vLLM's output: int32 [B, columns] token ids padded with -1, and the
    logprobs of [B * columns] rows if any request needs them.
    """
    if step is None:
        return None, sampler(logits=logits, sampling_metadata=one_row_each(metadata))
    if typical is None and _is_plain_greedy(metadata):
        return _finish(greedy_walk(logits, step.cu_nodes, step.tree, step.token_ids), [])
    given, drafts = None, step.token_ids
    if typical is not None:
        given, drafts = typical_paths(sampler, logits, step, metadata, typical)
    history = PathHistory(metadata, step.batch_size)
    levels: list[LogprobsTensors] = []
    row_of_node = step.row_of_node.numpy()

    def sample(level: int, nodes: Tensor, active: Tensor) -> Tensor:  # in numpy: small arrays
        tokens, walking = np.full(len(nodes), NO_TOKEN), active.numpy()
        if given is not None:
            tokens = given[:, level].numpy().copy()
            walking = walking & (tokens == NO_TOKEN)
            sampler.tokens = torch.from_numpy(tokens) if history.needs_all else None
        requests, own = history.at(walking)
        if len(requests):
            rows = torch.from_numpy(row_of_node[requests, nodes.numpy()[requests]])
            output = sampler(logits=logits.index_select(0, rows), sampling_metadata=own)
            tokens[requests] = output.sampled_token_ids.squeeze(1).numpy()
            if output.logprobs_tensors is not None:
                levels.append(output.logprobs_tensors)
        history.extend(tokens)
        return torch.from_numpy(tokens)

    verdict = lossless_walk(step.tree, drafts, sample)
    sampler.tokens = None
    return _finish(verdict, levels)


def _is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Whether only the argmax of each row is needed, so that no walk is required."""
    return bool(
        metadata.all_greedy
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not has_budgets(metadata)
        and not any(
            getattr(processor, "min_toks", True)
            for processor in metadata.logitsprocs.non_argmax_invariant
        )
    )


def _finish(verdict: Verdict, levels: list[LogprobsTensors]) -> tuple[Verdict, SamplerOutput]:
    """Output for vLLM, with only as many columns as the longest verdict.

    ``levels`` are the logprobs [B, ...] of each level of the walk, if any.
    """
    columns = int(verdict.path.num_accepted.max()) + 1
    tokens = verdict.output_token_ids[:, :columns].to(torch.int32)
    logprobs = None
    if levels:
        parts = zip(*(level[:3] for level in levels), strict=True)
        logprobs = LogprobsTensors(*(torch.stack(part, 1).flatten(0, 1) for part in parts))
    return verdict, SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)
