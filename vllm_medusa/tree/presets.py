"""Published trees by name, kept as data in ``presets/*.json`` together with their source."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from vllm_medusa.tree.topology import TokenTree, TreeError


@cache
def preset_names() -> tuple[str, ...]:
    """The names that `load_preset` knows, sorted."""
    files = (resources.files("vllm_medusa.tree") / "presets").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


@cache
def load_preset(name: str) -> TokenTree:
    """Load a published tree.

    Raises:
        TreeError: No preset has this name.

    """
    if name not in preset_names():
        raise TreeError(f"No preset tree is named {name!r}; the presets are {preset_names()}.")
    file = resources.files("vllm_medusa.tree") / "presets" / f"{name}.json"
    return TokenTree.from_paths(json.loads(file.read_text(encoding="utf-8"))["paths"])
