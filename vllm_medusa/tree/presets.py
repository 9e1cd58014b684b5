"""Published trees by name, stored in ``presets/*.json`` with their source; the default tree."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from vllm_medusa.tree.topology import TokenTree, TreeError

DEFAULT_TREE = TokenTree.from_paths(
    (
        *[(0,), (0, 0), (1,), (0, 1), (2,), (1, 0), (0, 0, 0)],
        *[(0, 2), (3,), (0, 3), (4,), (2, 0), (0, 0, 1), (0, 0, 0, 0)],
    )
)
"""The default tree for heads without one: 14 draft nodes, which are cheap to verify.

The first 13 nodes, best first, are those on which the published trees agree: they have the lowest
mean position over all presets. The last one uses the best choice of a fourth head.
"""


@cache
def preset_names() -> tuple[str, ...]:
    """The preset names, sorted."""
    files = (resources.files("vllm_medusa.tree") / "presets").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_preset(name: str) -> TokenTree:
    """Load a published tree.

    Raises:
        TreeError: No preset has this name.

    """
    if name not in preset_names():
        raise TreeError(f"There is no preset {name!r}; presets: {', '.join(preset_names())}.")
    file = resources.files("vllm_medusa.tree") / "presets" / f"{name}.json"
    return TokenTree.from_paths(json.loads(file.read_text(encoding="utf-8"))["paths"])
