"""Lookup on the V1 runner: the step's drafts, with what each request may copy."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.lookup.merge import ROOT, DraftTree
from vllm_medusa.worker.v1.topologies import Topologies


class Copies:
    """Joins what heads drafted with continuations from the requests' own texts."""

    def __init__(self, vocab_size: int, num_drafts: int) -> None:
        self._vocab_size, self._num_drafts = vocab_size, num_drafts
        self.lookup = Lookup(vocab_size)
        self.proposed_by: dict[str, list[int]] = {}  # of each draft, see `lookup.merge`

    def begin(self, alive: Container[str], requests: int) -> None:
        """Begin with the drafts of a step."""
        self.proposed_by = {}
        self.lookup.keep(alive, requests)

    def extend(
        self,
        batch: Any,
        index: int,
        depth: int,
        drafts: list[int],
        survival: list[float],
        topologies: Topologies,
    ) -> tuple[list[int], list[float]]:
        """The drafts of a request and their survivals with what it may copy.

        Args:
            batch: vLLM's input batch.
            index: of the request in it.
            depth: The deepest node that it has a use for, at least 1.
            drafts: of the heads.
            survival: of these.
            topologies: where their parents are, and those of the result will be.

        """
        name: str = batch.req_ids[index]
        tree = ROOT
        if drafts:
            parents = topologies.first(name, 1 + len(drafts))
            tree = DraftTree.of(np.array([0, *drafts]), parents, [1.0, *survival])
        sampled = name not in batch.greedy_reqs
        tokens = _text(batch, index)
        found = self.lookup.extend(name, tokens, tree, depth, self._num_drafts, sampled=sampled)
        if found is tree:
            return drafts, survival
        topologies.put(name, found.parents, found.num_copied)
        self.proposed_by[name] = found.proposed_by[1:].tolist()
        return found.token_ids[1:].tolist(), found.survival[1:].tolist()

    def forget(self) -> None:
        """Begin anew, with nothing learned."""
        self.lookup = Lookup(self._vocab_size)


def _text(batch: Any, index: int) -> np.ndarray:
    """A request's tokens behind the last that was given as an embedding: integer [n]."""
    length = batch.num_tokens_no_spec[index]
    known = batch.is_token_ids[index, :length]
    start = 0 if known.all() else length - int(known[::-1].argmin())
    tokens: np.ndarray = batch.token_ids_cpu[index, start:length]
    return tokens
