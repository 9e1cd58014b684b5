r"""The shape of a draft tree: the head and rank of each node.

A *path* lists, head by head, the rank of the chosen prediction: ``(0, 2)`` is the third choice of
head 1 under the first choice of head 0. The root is node 0, the last sampled token, with the empty
path; it is not a draft and never listed. Draft node ``i`` (from 1) has ``paths[i - 1]``.

Stored paths are *parents first*: a node's parent has a smaller index. Hence the first ``n`` nodes
of any tree are also a tree, which allows a scheduler to truncate a draft anywhere; if paths are
listed best first, the remaining part is also the best one.

    paths (0,) (1,) (0, 0)          0          node 0: the root
                                   / \
    nodes  1    2     3           1   2        ranks 0 and 1 of head 0
                                  |
                                  3            rank 0 of head 1
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from typing import SupportsIndex

MAX_NODES = 256  # root included: four 64-bit ancestor words per node

NodePath = tuple[int, ...]


class TreeError(ValueError):
    """An invalid tree; the message has the path, the allowed values and the remedy."""


@dataclass(frozen=True)
class TokenTree:
    """An immutable, validated draft tree; equal and hashed by its paths.

    Build it with `from_paths`, `dense` or `chain`. The constructor takes paths that are already
    parents first and raises `TreeError` for any other list.
    """

    paths: tuple[NodePath, ...]

    def __post_init__(self) -> None:
        _validate(self.paths)

    @classmethod
    def from_paths(cls, paths: Iterable[Iterable[SupportsIndex]]) -> TokenTree:
        """Build a tree from draft paths in any order.

        The order is kept, except that a path listed before its parent moves directly
        after it.

        Raises:
            TreeError: No path, an empty path, a rank that is not an integer >= 0, a duplicate path,
                a path whose parent is missing, or more than `MAX_NODES` nodes.

        """
        remedy = f"A tree is a list of paths such as [[0], [0, 0], [1]], not {paths!r}."
        listed = tuple(starmap(_as_path, enumerate(_entries(paths, remedy))))
        if not listed:
            raise TreeError(
                "The tree has no path, so it would draft nothing; use at least [[0]], "
                "or disable speculation."
            )
        return cls(tuple(_parents_first(listed)))

    @classmethod
    def dense(cls, widths: Sequence[int]) -> TokenTree:
        """Cartesian tree: every node of depth d has the ``widths[d]`` best choices of head d.

        Nodes are listed best first, by (sum of ranks, depth, path), which is parents first too.

        Raises:
            TreeError: No width, a width below 1, or more than `MAX_NODES` nodes.

        """
        checked = _as_widths(widths)
        num_nodes, level = 1, 1
        for width in checked:
            level *= width
            num_nodes += level
            if num_nodes > MAX_NODES:
                raise TreeError(
                    f"A dense tree of {len(checked)} widths, {list(checked[:8])}"
                    f"{' and more' if len(checked) > 8 else ''}, has more than {MAX_NODES} nodes, "
                    "root included; use smaller widths, fewer levels or a list of the best paths."
                )
        paths = (
            path
            for depth in range(1, len(checked) + 1)
            for path in product(*(range(width) for width in checked[:depth]))
        )
        return cls(tuple(sorted(paths, key=lambda path: (sum(path), len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> TokenTree:
        """Chain of the best choice of each of the first ``depth`` heads.

        Raises:
            TreeError: A depth below 1, or `MAX_NODES` or more.

        """
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth < MAX_NODES:
            raise TreeError(
                f"A chain of depth {depth!r}: the depth is an integer from 1 to {MAX_NODES - 1}, "
                "one level for each head used."
            )
        return cls(tuple((0,) * level for level in range(1, depth + 1)))

    def prefix(self, num_nodes: int) -> TokenTree:
        """The tree of the first ``num_nodes`` nodes, at least the root; all if there are fewer."""
        return self if num_nodes >= self.num_nodes else TokenTree(self.paths[: num_nodes - 1])

    def cut(self, max_depth: int | None = None, num_ranks: int | None = None) -> TokenTree:
        """The tree without nodes deeper than ``max_depth`` or of rank >= ``num_ranks``."""
        return TokenTree(
            tuple(
                path
                for path in self.paths
                if (max_depth is None or len(path) <= max_depth)
                and (num_ranks is None or max(path) < num_ranks)
            )
        )

    def to_lists(self) -> list[list[int]]:
        """The paths as JSON lists; `from_paths` restores the tree."""
        return [list(path) for path in self.paths]

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes to propose, without the root."""
        return len(self.paths)

    @property
    def num_nodes(self) -> int:
        """Number of nodes to score, including the root."""
        return len(self.paths) + 1

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node, the number of heads used; 0 for only a root."""
        return max((len(path) for path in self.paths), default=0)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """[num_nodes] index of each node's parent; -1 for the root."""
        index = {(): 0} | {path: node for node, path in enumerate(self.paths, start=1)}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[num_nodes] depth of each node; 0 for the root."""
        return (0, *(len(path) for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """[num_nodes] rank of each node among its head's predictions; 0 for the root."""
        return (0, *(path[-1] for path in self.paths))

    @cached_property
    def head_widths(self) -> tuple[int, ...]:
        """[max_depth] required predictions per head: 1 + highest rank."""
        widths = [0] * self.max_depth
        for path in self.paths:
            widths[len(path) - 1] = max(widths[len(path) - 1], path[-1] + 1)
        return tuple(widths)


def _entries(listed: object, remedy: str) -> tuple[object, ...]:
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable):
        raise TreeError(remedy)
    return tuple(listed)


def _as_path(position: int, path: object) -> NodePath:
    where = f"Path {position} of the tree is {path!r}"
    remedy = "a path is a list of ranks from 0, one for each head from the first, such as [0, 2]."
    ranks = _entries(path, f"{where}; {remedy}")
    if any(isinstance(rank, bool) or not isinstance(rank, SupportsIndex) for rank in ranks):
        raise TreeError(f"{where}, which contains a non-integer; {remedy}")
    return tuple(map(operator.index, ranks))  # type: ignore[arg-type]


def _as_widths(widths: object) -> tuple[int, ...]:
    remedy = "use one integer >= 1 per head, such as [4, 3, 2]."
    listed = _entries(widths, f"The widths of a dense tree are {widths!r}; {remedy}")
    if not listed:
        raise TreeError(f"A dense tree without widths would draft nothing; {remedy}")
    for position, width in enumerate(listed):
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise TreeError(f"Width {position} of the dense tree is {width!r}; {remedy}")
    return listed  # type: ignore[return-value]


def _parents_first(paths: Sequence[NodePath]) -> Iterator[NodePath]:
    """Yield the paths in order, each early child directly after its parent, orphans last."""
    waiting: dict[NodePath, list[NodePath]] = {}
    seen: set[NodePath] = {()}
    for path in paths:
        if path[:-1] not in seen:
            waiting.setdefault(path[:-1], []).append(path)
            continue
        ready = [path]
        while ready:
            node = ready.pop()
            seen.add(node)
            yield node
            ready.extend(reversed(waiting.pop(node, [])))
    for orphans in waiting.values():
        yield from orphans


def _validate(paths: Sequence[NodePath]) -> None:
    if len(paths) + 1 > MAX_NODES:
        raise TreeError(
            f"The tree has {len(paths) + 1} nodes, root included; at most {MAX_NODES} are allowed. "
            "Keep only the best paths."
        )
    everything = set(paths)
    seen: set[NodePath] = {()}
    for position, path in enumerate(paths):
        if not path:
            raise TreeError(
                f"Path {position} of the tree is empty; the root is implicit and not "
                "listed. Remove the empty path."
            )
        if min(path) < 0:
            raise TreeError(
                f"Path {list(path)} has the negative rank {min(path)}; ranks count from 0, the "
                "head's best prediction."
            )
        if path in seen:
            raise TreeError(f"Path {list(path)} is listed twice; list every node once.")
        parent = path[:-1]
        if parent not in everything and parent:
            raise TreeError(
                f"Path {list(path)} is an orphan: its parent {list(parent)} is not in the tree. "
                f"Add {list(parent)} or remove {list(path)}."
            )
        if parent not in seen:
            raise TreeError(
                f"Path {list(path)} comes before its parent {list(parent)}; "
                "TokenTree.from_paths reorders such a list."
            )
        seen.add(path)
