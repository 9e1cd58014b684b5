"""A tree as text, for terminals and logs.

root
|- 0  61.0 %
|  |- 0  22.4 %
|  `- 1  5.1 %
`- 1  12.3 %
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_medusa.tree.topology import Path


def sketch_tree(
    paths: Sequence[Sequence[int]], chances: Mapping[Path, float] | None = None
) -> list[str]:
    """Draw a tree, one line per node, children by rank, with the ``chances`` of nodes."""
    children: dict[Path, list[Path]] = {(): []}
    for path in sorted(map(tuple, paths)):
        children[path] = []
        children[path[:-1]].append(path)

    def label(path: Path) -> str:
        name = str(path[-1]) if path else "root"
        return name if chances is None or not path else f"{name}  {100 * chances[path]:.1f} %"

    def below(path: Path, margin: str) -> Iterator[str]:
        for child in children[path]:
            last = child == children[path][-1]
            yield f"{margin}{'`- ' if last else '|- '}{label(child)}"
            yield from below(child, margin + ("   " if last else "|  "))

    return [label(()), *below((), "")]
