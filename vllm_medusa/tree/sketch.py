"""A tree as text, for terminals and logs.

root 1.00
|- 0 0.61
|  |- 0 0.22
|  `- 1 0.05
`- 1 0.12
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_medusa.tree.topology import Path


def sketch_tree(
    paths: Sequence[Sequence[int]], chances: Mapping[Path, float] | None = None
) -> list[str]:
    """Draw a tree, one line a node, children by rank; ``chances`` of nodes are written beside."""
    children: dict[Path, list[Path]] = {(): []}
    for path in sorted(map(tuple, paths)):
        children[path] = []
        children[path[:-1]].append(path)

    def label(path: Path) -> str:
        name = str(path[-1]) if path else "root"
        return name if chances is None or path not in chances else f"{name} {chances[path]:.2f}"

    def below(path: Path, margin: str) -> Iterator[str]:
        for child in children[path]:
            last = child == children[path][-1]
            yield f"{margin}{'`- ' if last else '|- '}{label(child)}"
            yield from below(child, margin + ("   " if last else "|  "))

    return [label(()), *below((), "")]
