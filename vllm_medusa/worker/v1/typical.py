"""Typical acceptance for the requests that select it, with vLLM's processed logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from vllm_medusa.sampler import Path, Verdict, close_path, typical_path
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree.batch import TreeBatch
from vllm_medusa.worker.requests import TypicalRule
from vllm_medusa.worker.v1.history import (
    MinTokensAt,
    min_token_rules,
    needs_tokens,
    with_min_tokens,
)


@dataclass(frozen=True)
class TypicalChoice:
    """Paths chosen by the typical rule for Q of the B requests; the walk only ends them."""

    sampler: Sampler
    raw: Tensor  # [Q, N, V] the target's logits
    processed: Tensor  # float32 [Q, N, V] after penalties, temperature and truncation
    tree: TreeBatch  # of the Q
    token_ids: Tensor  # int64 [Q, N]
    requests: Tensor  # int64 [Q] index among B
    path: Path  # of the Q
    paths: list[list[int]]  # [B] accepted token ids; empty for the others
    greedy_root: Tensor  # bool [Q]

    @classmethod
    def make(
        cls,
        sampler: Sampler,
        logits: Tensor,
        step: TreeStep,
        metadata: SamplingMetadata,
        typical: TypicalRule,
    ) -> TypicalChoice:
        """Process the rows of the Q requests as plain decoding would, then choose their paths."""
        requests = typical.mask.nonzero().flatten()
        chosen = requests.tolist()
        tree = step.tree.select(requests)
        token_ids = step.token_ids[requests]
        raw = logits[step.row_of_node[requests]]  # [Q, N, V]
        rows = raw.flatten(0, 1)
        processed = _process(sampler, rows, metadata, chosen, tree, token_ids).view(*raw.shape)
        path = typical_path(
            tree,
            token_ids,
            processed.softmax(-1),
            typical.epsilon[requests],
            typical.delta[requests],
        )
        accepted = token_ids.gather(1, path.nodes)[:, 1:].tolist()
        paths: list[list[int]] = [[] for _ in range(step.batch_size)]
        for request, tokens, count in zip(
            chosen, accepted, path.num_accepted.tolist(), strict=True
        ):
            paths[request] = tokens[:count]
        roots = typical.greedy_root[requests]
        return cls(sampler, raw, processed, tree, token_ids, requests, path, paths, roots)

    def hide(self, tree: TreeBatch) -> TreeBatch:
        """The batch's trees with those of the Q truncated to the root, so that no walk descends."""
        return replace(tree, num_nodes=tree.num_nodes.index_fill(0, self.requests, 1))

    def start(self, nodes: Tensor) -> Tensor:
        """Make the Q sample at their last accepted node: nodes int64 [B]."""
        return nodes.index_copy(0, self.requests, self.path.last_node)

    def end(self, tokens: Tensor) -> Tensor:
        """The token that ends the step (int64 [B]); the argmax with greedy_root."""
        last = self.processed[torch.arange(len(self.requests)), self.path.last_node]  # [Q, V]
        ended = torch.where(self.greedy_root, last.argmax(-1), tokens[self.requests])
        return tokens.index_copy(0, self.requests, ended)

    def merge(self, verdict: Verdict) -> Verdict:
        """Put the Q's accepted paths before the last token from the walk."""
        final = verdict.output_token_ids[self.requests, 0]
        mine = close_path(self.path, self.token_ids, final)

        def put(into: Tensor, values: Tensor) -> Tensor:
            return into.index_copy(0, self.requests, values)

        path = Path(
            nodes=put(verdict.path.nodes, mine.path.nodes),
            num_accepted=put(verdict.path.num_accepted, mine.path.num_accepted),
            last_node=put(verdict.path.last_node, mine.path.last_node),
        )
        return Verdict(path, put(verdict.output_token_ids, mine.output_token_ids))

    def merge_logprobs(
        self, logprobs: LogprobsTensors, verdict: Verdict, metadata: SamplingMetadata
    ) -> LogprobsTensors:
        """Set the logprobs of the Q's whole paths: [B, L, ...] -> [B, L', ...]."""
        columns = int(verdict.path.num_accepted.max()) + 1
        nodes = self.path.nodes[:, :columns]  # [Q, L']
        source = self.processed if "processed" in self.sampler.logprobs_mode else self.raw
        rows = source[torch.arange(len(self.requests)).unsqueeze(1), nodes].flatten(0, 1)
        if self.sampler.logprobs_mode.endswith("logits"):
            rows = rows.to(torch.float32)
        else:
            rows = self.sampler.compute_logprobs(rows)
        tokens = verdict.output_token_ids[self.requests, :columns].flatten().clamp(min=0)
        if metadata.logprob_token_ids:
            mine = self._of_named_tokens(
                rows, tokens, columns, logprobs.logprobs.shape[-1], metadata
            )
        else:
            mine = self.sampler.gather_logprobs(rows, metadata.max_num_logprobs, tokens)

        def put(into: Tensor, values: Tensor) -> Tensor:
            short = columns - into.shape[1]
            if short > 0:  # a lossless walk was shorter; its added columns are not read
                into = torch.cat([into, into[:, -1:].expand(-1, short, *into.shape[2:])], 1)
            values = values.view(len(self.requests), columns, *values.shape[1:])
            return into[:, :columns].index_copy(0, self.requests, values.to(into.dtype))

        return LogprobsTensors(
            put(logprobs.logprob_token_ids, mine.logprob_token_ids),
            put(logprobs.logprobs, mine.logprobs),
            put(logprobs.selected_token_ranks, mine.selected_token_ranks),
        )

    def _of_named_tokens(
        self, rows: Tensor, tokens: Tensor, columns: int, width: int, metadata: SamplingMetadata
    ) -> LogprobsTensors:
        """Logprobs of requested token ids: rows [Q * L', V] -> [Q * L', width].

        As in vLLM's sampler, they replace the most probable tokens in the whole batch, and a
        request with fewer ids than another is padded.
        """
        named = metadata.logprob_token_ids or {}
        lists = {
            place * columns + column: named.get(request, [])
            for place, request in enumerate(self.requests.tolist())
            for column in range(columns)
        }
        found = self.sampler.gather_specific_token_logprobs(rows, lists, tokens)
        assert found is not None
        missing = width - found.logprobs.shape[-1]
        pad = torch.nn.functional.pad
        return LogprobsTensors(
            pad(found.logprob_token_ids, (0, missing)),
            pad(found.logprobs, (0, missing), value=-torch.inf),
            found.selected_token_ranks,
        )


def _histories(tree: TreeBatch, token_ids: Tensor) -> list[list[int]]:
    """For each node of Q trees the draft token ids down to it: [Q * N]."""
    rows: list[list[int]] = []
    for parents, ids in zip(tree.parents.tolist(), token_ids.clamp(min=0).tolist(), strict=True):
        of_node: list[list[int]] = [[]]
        for node in range(1, len(parents)):
            of_node.append([*of_node[parents[node]], ids[node]])
        rows.extend(of_node)
    return rows


def _process(
    sampler: Sampler,
    logits: Tensor,  # [Q * N, V]
    metadata: SamplingMetadata,
    chosen: list[int],  # the Q requests
    tree: TreeBatch,  # of the Q
    token_ids: Tensor,  # int64 [Q, N]
) -> Tensor:
    """Penalties, bans, temperature and truncation, applied row by row as in plain decoding."""
    owners = [request for request in chosen for _ in range(tree.max_nodes)]  # [Q * N]
    of = torch.tensor(owners, device=token_ids.device)

    def pick(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[of]

    changes: dict[str, Any] = {
        "temperature": pick(metadata.temperature),
        "top_p": pick(metadata.top_p),
        "top_k": pick(metadata.top_k),
        "generators": {},
        "allowed_token_ids_mask": pick(metadata.allowed_token_ids_mask),
        "bad_words_token_ids": {
            row: metadata.bad_words_token_ids[request]
            for row, request in enumerate(owners)
            if request in metadata.bad_words_token_ids
        },
        "spec_token_ids": None,
        "thinking_budget_state_holder": None,  # refused for typical requests
    }
    if rules := min_token_rules(metadata):
        nodes = list(zip(owners, tree.depths.flatten().tolist(), strict=True))
        changes["logitsprocs"] = with_min_tokens(metadata, MinTokensAt(rules, nodes))
    if not metadata.no_penalties:
        for name in ("frequency_penalties", "presence_penalties", "repetition_penalties"):
            changes[name] = getattr(metadata, name)[of]
        changes["prompt_token_ids"] = pick(metadata.prompt_token_ids)
    if needs_tokens(metadata):
        changes["output_token_ids"] = [
            [*metadata.output_token_ids[request], *history]
            for request, history in zip(owners, _histories(tree, token_ids), strict=True)
        ]
    mine = replace(metadata, **changes)
    logits = sampler.apply_logits_processors(logits.to(torch.float32, copy=True), mine, False)
    logits = sampler.apply_temperature(logits, mine.temperature, mine.all_random)
    return apply_top_k_top_p(logits, mine.top_k, mine.top_p)
