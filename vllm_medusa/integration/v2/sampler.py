"""Verification: a token is sampled at every node, then the walk follows the matching drafts.

On V2 a sample is a pure function of (logits, seed, position): the noise is hashed, no generator
advances. So all nodes can be sampled at once, each at its own position (base + depth),
and those on the path are the tokens that plain V2 samples there. The lossless walk needs nothing
else: it is `target_verdict` with the sampled tokens.

Penalties and bad words depend on earlier tokens, which vLLM's kernels read from the preceding rows,
as in a chain. For requests that use them every node gets the rows of its own path
(`scorer.chains`), and is sampled in the last of these rows.

Ranks of a tensor-parallel group have the same logits and so the same verdict: nothing here
is random, and ties are broken by the lowest index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.sampler import Verdict, close_path, combine, launch, select_verdict
from vllm_medusa.scorer.chains import RowLayout, first_rows, height, lay_out
from vllm_medusa.tree.batch import TreeBatch


class TreeSampler(RejectionSampler):
    """Decides every request's path and tokens; vLLM's own class handles chains.

    It inherits only attributes that vLLM reads, not computation.
    """

    def __init__(
        self,
        sampler: Sampler,
        config: SpeculativeConfig,
        device: torch.device,
        trees: RequestTrees,
        positions: Tensor,  # int64 [>= T], of the step's tokens
    ):
        super().__init__(sampler, config, device)
        self.trees, self.positions = trees, positions

    def __call__(
        self,
        logits: Tensor,  # [sum of num_nodes, V], the target's at every node
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,  # unused: drafts are not sampled from a distribution
        invalid_drafts: Tensor | None = None,  # bool [sum of num_nodes], drafts without a mask
    ) -> SamplerOutput:
        """Verify the step's trees.

        Returns int64 [B, D + 1] token ids padded with -1, and their counts; for requests that
        need them, the logprobs of B * (D + 1) rows.
        """
        sampler, step = self.sampler, self.trees.step
        assert step is not None, "called only with drafts"
        prefill_lens = sampler.req_states.prefill_len.gpu
        token_ids, _ = gather_draft_sampled(  # -1 where the scheduler padded a prefill
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
            prefill_lens,
        )
        if invalid_drafts is not None:
            token_ids = token_ids.masked_fill(invalid_drafts, -1)
        positions = self.positions[step.rows]
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        verdicts, logprobs = [], []
        for part in self._parts(logits, input_batch, token_ids, positions):
            verdict, drawn = self._decide(part)
            verdicts.append(verdict)
            logprobs.append(self._logprobs(part, drawn, verdict, input_batch))
        verdict = verdicts[0]
        if len(verdicts) > 1:
            verdict = combine(lambda *parts: torch.cat(parts), *verdicts)
        self.trees.verdict = verdict
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (verdict.path.num_accepted + 1).to(torch.int32),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            prefill_lens,
        )
        return SamplerOutput(
            sampled_token_ids=verdict.output_token_ids,
            logprobs_tensors=_join_logprobs(logprobs, verdict.output_token_ids.shape),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _parts(
        self, logits: Tensor, batch: InputBatch, token_ids: Tensor, positions: Tensor
    ) -> Iterator[_Part]:
        """Split by requests, so that vLLM's limit on fp32 logits holds; usually one part."""
        step, trees, device = self.trees.step, self.trees, logits.device
        assert step is not None
        slots = batch.idx_mapping_np
        by_path = trees.requests.by_path(slots)
        first_row = batch.cu_num_logits_np
        layout: RowLayout | None = None
        if by_path.any():
            first_row = first_rows(by_path, step.num_nodes, height(step.tree))
            layout = lay_out(
                step.tree,
                async_tensor_h2d(by_path, device=device),
                async_tensor_h2d(first_row, device=device),
                int(first_row[-1]),
            )
        limit = get_max_chunk_logits(logits.shape[-1])
        start = 0
        while start < batch.num_reqs:
            fits = int(np.searchsorted(first_row, first_row[start] + limit, side="right")) - 1
            end = min(max(fits, start + 1), batch.num_reqs)
            chosen = slice(start, end)
            tree = step.tree
            if end - start < batch.num_reqs:
                tree = tree.select(torch.arange(start, end, device=device))
            of_node = step.row_of_node[chosen]
            lo, hi = int(first_row[start]), int(first_row[end])
            rows: slice | Tensor = slice(lo, hi)
            index, local = of_node - lo, batch.expanded_local_pos[rows]
            if layout is not None:
                rows, local = layout.rows[lo:hi], layout.local[lo:hi]
                index = layout.index[chosen] - lo
            yield _Part(
                tree=tree,
                token_ids=token_ids[of_node].to(torch.int64),
                requests=batch.idx_mapping[chosen],
                slots=slots[chosen],
                seq_lens=batch.seq_lens_cpu_upper_bound.numpy()[chosen],
                logits=logits[rows],
                of_row=batch.expanded_idx_mapping[rows],
                local=local,
                positions=positions[rows],
                row_token_ids=token_ids[rows],
                index=index,
            )
            start = end

    def _decide(self, part: _Part) -> tuple[Verdict, Tensor]:
        """The verdict, and the processed logits [R, V] of the part's rows."""
        requests, tree, ids = self.trees.requests, part.tree, part.token_ids
        processed = self.sampler.apply_sampling_params(
            part.logits,
            part.of_row,
            part.requests,
            part.slots,
            part.positions,
            part.row_token_ids,
            part.local,
            part.seq_lens,
        )
        drawn = self._draw(processed, part)[part.index]  # int64 [B, N]
        verdict = launch.target_verdict(tree, ids, drawn)
        rule = requests.typical(part.slots)
        if rule is not None:
            path = launch.typical_path(tree, ids, processed, part.index, rule.epsilon, rule.delta)
            last = path.last_node.unsqueeze(1)
            final = drawn.gather(1, last).squeeze(1)
            if rule.any_greedy_root:
                likeliest = processed[part.index.gather(1, last).squeeze(1)].argmax(-1)
                final = torch.where(rule.greedy_root, likeliest, final)
            verdict = select_verdict(rule.mask, close_path(path, ids, final), verdict)
        return verdict, processed

    def _draw(self, processed: Tensor, part: _Part) -> Tensor:
        """Sample one token per row, int64 [R], as vLLM's sampler does for seeded requests."""
        states = self.sampler.sampling_states
        if not states.temperature.np[part.slots].any():
            return processed.argmax(-1)
        return gumbel_sample(
            processed,
            part.of_row,
            states.temperature.gpu,
            states.seeds.gpu,
            part.positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _logprobs(
        self, part: _Part, processed: Tensor, verdict: Verdict, batch: InputBatch
    ) -> LogprobsTensors | None:
        """Logprobs of each request's path: D + 1 rows per request; trailing rows are undefined."""
        sampler = self.sampler
        dims = sampler.get_logprobs_dims(batch.idx_mapping_np)
        if dims is None:
            return None
        num_logprobs, max_token_ids = dims
        use_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        rows = part.index.gather(1, verdict.path.nodes)  # [B, D + 1]
        return compute_topk_scores(
            (processed if use_processed else part.logits)[rows.flatten()],
            num_logprobs,
            verdict.output_token_ids.clamp(min=0).flatten(),
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=part.requests.repeat_interleave(rows.shape[1]),
            max_per_req_token_ids=max_token_ids,
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """B requests whose nodes are sampled together, in R rows."""

    tree: TreeBatch
    token_ids: Tensor  # int64 [B, N]; -1: no draft
    requests: Tensor  # int64 [B] slot in vLLM's state
    slots: np.ndarray  # the same on the host
    seq_lens: np.ndarray  # [B] upper bounds
    logits: Tensor  # [R, V]
    of_row: Tensor  # int64 [R] slot of the row's request
    local: Tensor  # int32 [R] number of preceding rows in its history
    positions: Tensor  # int64 [R]
    row_token_ids: Tensor  # int32 [R]
    index: Tensor  # int64 [B, N] row in which a node is sampled


def _join_logprobs(
    parts: list[LogprobsTensors | None], shape: tuple[int, ...]
) -> LogprobsTensors | None:
    """Concatenate the parts' logprobs, with each request's first row; ``shape`` is (B, D + 1)."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    batch, columns = shape
    return LogprobsTensors.cat(
        tensors, cu_num_generated_tokens=[columns * i for i in range(batch + 1)]
    )
