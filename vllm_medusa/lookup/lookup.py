"""Lookup for the requests of an engine: what each may copy, and what became of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_medusa.lookup.chances import Chances
from vllm_medusa.lookup.merge import DraftTree, merge
from vllm_medusa.lookup.search import Ints, continuation, longest_match

LEAST = 0.02  # survival below which a token of a continuation is not offered


@dataclass(frozen=True)
class _Found:
    """A continuation whose request hasn't gone on yet."""

    token_ids: Ints
    matched: int
    sampled: bool


class Lookup:
    """Finds continuations and learns how far they can be trusted."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.chances = Chances()
        self._waiting: dict[str, _Found] = {}

    def learn(self, name: str, said: Sequence[int]) -> None:
        """Compare what a request said with what was found for it last."""
        found = self._waiting.pop(name, None)
        if found is None or not len(said):
            return
        known = min(len(found.token_ids), len(said))
        differ = found.token_ids[:known] != np.asarray(said)[:known]
        ended = bool(differ.any())
        right = int(differ.argmax()) if ended else known
        self.chances.learn(found.matched, right, ended=ended, sampled=found.sampled)

    def extend(
        self, name: str, tokens: Ints, tree: DraftTree, depth: int, most: int, *, sampled: bool
    ) -> DraftTree:
        """A request's tree with what may be copied.

        Args:
            name: of the request.
            tokens: [n] its prompt and output.
            tree: that was drafted for it.
            depth: The deepest node that it has a use for, at least 1.
            most: drafts of the result.
            sampled: whether it samples.

        """
        matched, start = longest_match(tokens)
        if not matched:
            return tree
        copied = continuation(tokens, start, min(depth, most), self._vocab_size)
        survival = self.chances.survival(matched, len(copied), sampled=sampled)
        self._waiting[name] = _Found(copied, matched, sampled)
        count = int(np.count_nonzero(survival >= LEAST))
        return merge(tree, copied[:count], survival[:count], most) if count else tree

    def keep(self, alive: Container[str], requests: int) -> None:
        """Forget requests that are gone, if there are many more than ``requests``."""
        if len(self._waiting) > 2 * requests + 64:
            self._waiting = {name: each for name, each in self._waiting.items() if name in alive}
