"""Published trees by name, kept as data in ``presets/*.json`` with their source; the default."""

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
"""The default tree of heads without one: 14 draft nodes, which are cheap to verify.

The first 13 nodes, best first, are the ones that the published trees agree on: they have the least
mean position over all presets. The last one puts the best choice of a fourth head to use.
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
        raise TreeError(f"No preset is named {name!r}; presets: {', '.join(preset_names())}.")
    file = resources.files("vllm_medusa.tree") / "presets" / f"{name}.json"
    return TokenTree.from_paths(json.loads(file.read_text(encoding="utf-8"))["paths"])
