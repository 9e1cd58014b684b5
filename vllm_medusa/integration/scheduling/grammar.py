"""Grammars along the branches of a draft tree: allowed nodes and node masks.

Grammars are vLLM's: a grammar has one state, which advances along a path by accepting tokens and
is restored by rollback. Nodes are parents first; the root is node 0, draft i is node i + 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

_NAME = "draft"  # request id in vLLM's errors
_MAX_SPELLINGS = 4096  # max token sets whose comparison is cached
_MAX_ALLOWED = 16  # up to this number of allowed tokens, all are drafted
FORCED, LIKELY = 1, 3  # kinds of forced drafts: the only allowed token, the likeliest of a few
MIN_RUN_SURVIVAL = 0.4  # min survival of drafts without heads
_CHANCE_KEPT = 1.0 - 1.0 / 512.0  # decay of observations per token
_MIN_SURVIVAL = 0.05  # below it, only drafts of heads are checked

Spell = Callable[[Sequence[int]], Sequence[str | None]]  # token ids to their texts
Option = tuple[int, int | None, float]  # a child: token, node in the drafts, probability


@dataclass
class Candidates:
    """Drafts of a request, parents first and best first."""

    token_ids: list[int]
    parents: list[int]  # parent node of each, 0 for the root
    survival: list[float] = field(default_factory=list)  # of each; empty if only on the device
    # of each, if chosen by a grammar: its kind if it needs no heads, else 0; see `forced_run`
    forced: list[int] = field(default_factory=list)

    def first(self, num_drafts: int) -> Candidates:
        """The best ``num_drafts`` drafts."""
        return self.subset(range(1, 1 + min(num_drafts, len(self.parents))))

    def subset(self, kept: Sequence[int]) -> Candidates:
        """Only the nodes in ``kept``, parents first."""
        place = {0: 0} | {node: index for index, node in enumerate(kept, 1)}
        return Candidates(
            [self.token_ids[node - 1] for node in kept],
            [place[self.parents[node - 1]] for node in kept],
            [self.survival[node - 1] for node in kept] if self.survival else [],
            [self.forced[node - 1] for node in kept] if self.forced else [],
        )

    def path(self, node: int) -> list[int]:
        """The tokens on the path to a node, excluding the root."""
        tokens: list[int] = []
        while node:
            tokens.append(self.token_ids[node - 1])
            node = self.parents[node - 1]
        return tokens[::-1]


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of every node, root included."""
    children: list[list[int]] = [[] for _ in range(1 + len(parents))]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)
    return children


def choose(
    grammar: StructuredOutputGrammar,
    drafts: Candidates,
    max_depth: int,
    mask: Tensor,  # int32 [1, ceil(V / 32)], buffer for masks
    vocab_size: int,
    spelling: Spelling,
    longest: float,  # see `Spelling.chances`
    deepest: int = 0,  # max depth of a forced run, which may be above ``max_depth``
) -> Candidates:
    """The drafts that the grammar allows, and those that it nearly forces, best first.

    If only a few tokens are allowed, all of them are drafted, so a forced run is a chain. No drafts
    follow the end of the grammar: the request ends there.
    """
    given = [1.0, *drafts.survival]
    children, row = children_of(drafts.parents), mask.numpy()[0]
    found = Candidates([], [])

    def options(node: int | None, survival: float) -> tuple[list[Option], int | None, int]:
        """The allowed children of a node, the token drafted without heads, and its kind."""
        below = [] if node is None else children[node]
        known = {drafts.token_ids[child - 1]: child for child in below}
        chances = {t: given[child] / max(given[node or 0], 1e-9) for t, child in known.items()}
        if survival < _MIN_SURVIVAL:
            allowed = [token for token in known if grammar.validate_tokens([token])]
        else:
            grammar.fill_bitmask(mask, 0)
            few = few_tokens(row, vocab_size)
            if few:
                prior = spelling.chances(few, longest)
                chance = among_few(prior, [chances.get(token, 0.0) for token in few])
                several = [(t, known.get(t), p) for t, p in zip(few, chance, strict=True)]
                return several, few[prior.index(max(prior))], FORCED if len(few) == 1 else LIKELY
            # none: only stop tokens may be allowed, and vLLM then ends the request
            allowed = [] if few is not None else [t for t in known if allows(row, t)]
        return [(token, known[token], chances[token]) for token in allowed], None, 0

    def descend(node: int | None, new: int, survival: float, depth: int, run: float) -> None:
        several, forced, kind = options(node, survival)
        for token, child, chance in several:
            in_run = run >= MIN_RUN_SURVIVAL and token == forced
            found.forced.append(kind if in_run else 0)
            found.token_ids.append(token)
            found.parents.append(new)
            found.survival.append(survival * min(chance, 1.0))
            place, worth = len(found.parents), found.survival[-1]
            descends = worth >= _MIN_SURVIVAL or (child is not None and children[child])
            bottom = max(max_depth, deepest) if in_run else max_depth
            if depth < bottom and descends and grammar.accept_tokens(_NAME, [token]):
                if not grammar.is_terminated():
                    descend(child, place, worth, depth + 1, worth if in_run else 0.0)
                grammar.rollback(1)

    if max_depth > 0 and not grammar.is_terminated():
        descend(0, 0, 1.0, 1, 1.0)
    order = sorted(range(1, 1 + len(found.parents)), key=lambda node: -found.survival[node - 1])
    return found.subset(order)


def few_tokens(mask: npt.NDArray[np.int32], vocab_size: int) -> list[int] | None:
    """The tokens that a row of a bitmask allows; None if there are too many.

    Bits of the last word beyond the vocabulary are ignored.
    """
    words = np.flatnonzero(mask)
    if len(words) > _MAX_ALLOWED:
        return None
    tokens: list[int] = []
    for word in words.tolist():
        bits = int(mask[word]) & 0xFFFFFFFF
        while bits:
            tokens.append(32 * word + (bits & -bits).bit_length() - 1)
            bits &= bits - 1
    tokens = [token for token in tokens if token < vocab_size]
    return tokens if len(tokens) <= _MAX_ALLOWED else None


def forced_run(
    grammar: StructuredOutputGrammar,
    max_depth: int,
    mask: Tensor,
    vocab_size: int,
    spelling: Spelling,
    longest: float,
) -> Candidates:
    """The chain that the grammar nearly forces, drafted without heads.

    Its first token is included at any probability, to report its survival. For the
    arguments see `choose`.
    """
    none, first = Candidates([], []), min(max_depth, 1)
    found = choose(grammar, none, first, mask, vocab_size, spelling, longest, max_depth)
    return found.subset(
        [
            node
            for node, kind in enumerate(found.forced, 1)
            if kind
            and (found.parents[node - 1] == 0 or found.survival[node - 1] >= MIN_RUN_SURVIVAL)
        ]
    )


class Spelling:
    """Estimates the probabilities of a few allowed tokens from their texts."""

    def __init__(self, spell: Spell) -> None:
        self._wholes = functools.lru_cache(_MAX_SPELLINGS)(functools.partial(_wholes, spell))

    def chances(self, tokens: Sequence[int], longest: float) -> list[float]:
        """Probabilities of the allowed tokens, from their texts.

        A model that generates a forced text usually takes its longest token: with probability
        ``longest`` the next token is one that is not a prefix of another allowed one.
        """
        if len(tokens) == 1:
            return [1.0]
        wholes = self._wholes(tuple(tokens))
        many, rest = sum(wholes), len(wholes) - sum(wholes)
        share = longest if rest else 1.0
        return [share / many if whole else (1 - share) / rest for whole in wholes]


def _wholes(spell: Spell, tokens: tuple[int, ...]) -> list[bool]:
    """The tokens that are not a prefix of another one."""
    texts = [text or "" for text in spell(tokens)]  # None: no such token
    return [not any(other != text and other.startswith(text) for other in texts) for text in texts]


def among_few(prior: Sequence[float], chances: Sequence[float]) -> list[float]:
    """Probabilities of the allowed tokens, from their texts and from heads if available."""
    total = sum(chances)
    if total <= 0.0 or len(prior) == 1:
        return list(prior)
    return [(p + chance / total) / 2 for p, chance in zip(prior, chances, strict=True)]


def fill_masks(
    grammar: StructuredOutputGrammar,
    masks: Tensor,  # int32 [rows, ceil(V / 32)]
    root: int,
    token_ids: Sequence[int],
    parents: Sequence[int],
) -> None:
    """Fill the rows of a request's draft nodes, which follow the filled row of its ``root``.

    Each is the grammar's state after the node's own path. Nodes that the grammar forbids, that were
    never drafted (-1) or that are below its end get a row that allows all: no walk reaches them.
    """
    children, rows = children_of(parents), masks.numpy()
    rows[root + 1 : root + 1 + len(parents)] = -1

    def descend(node: int) -> None:
        for child in children[node]:
            token = token_ids[child - 1]
            if not allows(rows[root + node], token) or not grammar.accept_tokens(_NAME, [token]):
                continue
            if not grammar.is_terminated():
                grammar.fill_bitmask(masks, root + child)
                descend(child)
            grammar.rollback(1)

    if not grammar.is_terminated():
        descend(0)


def allows(mask: npt.NDArray[np.int32], token: int) -> bool:
    """Whether a row of a bitmask allows a token."""
    return token >= 0 and bool(int(mask[token >> 5]) >> (token & 31) & 1)


class Chance:
    """How often a model takes the longest of a few allowed tokens, as a decaying average."""

    def __init__(self) -> None:
        self._hits, self._seen = 0.85 * 8.0, 8.0  # prior

    def observe(self, hit: bool) -> None:
        """Add an observation."""
        self._hits = _CHANCE_KEPT * self._hits + hit
        self._seen = _CHANCE_KEPT * self._seen + 1.0

    @property
    def value(self) -> float:
        """The estimate."""
        return self._hits / self._seen
