"""The forms of a tree option: preset name, file, JSON text, list of paths, widths, chain."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_medusa.tree.presets import load_preset, preset_names
from vllm_medusa.tree.topology import TokenTree, TreeError

TreeValue = str | Path | list[Any] | dict[str, Any]

FORMS = (
    "a preset name, the path of a JSON file, a list of paths such as [[0], [0, 0], [1]], "
    '{"paths": [[0], [1]]}, {"dense": [4, 3, 2]} or {"chain": 4}'
)

_READERS: dict[str, Callable[[Any], TokenTree]] = {
    "paths": TokenTree.from_paths,
    "tree": TokenTree.from_paths,  # name used by other tools
    "dense": TokenTree.dense,
    "chain": TokenTree.chain,
    "preset": load_preset,
}
_NOTE = "source"  # origin of a tree file; allowed, not read


def read_tree(value: TreeValue) -> TokenTree:
    """Read any of `FORMS`, also as a JSON string such as ``'{"chain": 4}'``.

    A file has a list of paths or one of the dicts, which may have a ``"source"`` note.

    Raises:
        TreeError: None of the forms, no such preset, unreadable file, invalid JSON, or not a tree.

    """
    match value:
        case Path():
            return _from_file(value)
        case str() if value in preset_names():
            return load_preset(value)
        case str() if value.lstrip().startswith(("[", "{")):
            return _from_json(value)
        case str() if value.endswith(".json") or (value and Path(value).exists()):
            return _from_file(Path(value))
        case str():
            raise TreeError(
                f"There is no preset or file {shown(value)}"
                f"{did_you_mean(value, preset_names())}. Presets: {', '.join(preset_names())}. "
                f"Use {FORMS}."
            )
        case list() | tuple():
            return TokenTree.from_paths(value)
        case Mapping():
            return _from_mapping(value)
    raise TreeError(f"The tree is {shown(value)}; use {FORMS}.")


def shown(value: object) -> str:
    """A value's repr for a message, truncated to 120 characters; never raises."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits or levels
        return f"of type {type(value).__name__}, too large to print"
    return text if len(text) <= 120 else f"{text[:120]}..."


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` if a name is close, else nothing."""
    match = difflib.get_close_matches(shown(name).strip("'\""), list(allowed), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _from_mapping(value: Mapping[str, Any]) -> TokenTree:
    allowed = (*_READERS, _NOTE)
    for key in value:
        if key not in allowed:
            raise TreeError(
                f"The tree has the unknown key {shown(key)}{did_you_mean(key, allowed)}; "
                f"allowed: {', '.join(allowed)}."
            )
    forms = [key for key in value if key != _NOTE]
    if len(forms) != 1:
        found = " and ".join(forms) or "no tree"
        raise TreeError(f"The tree's dict has {found}; use exactly one of {list(_READERS)}.")
    return _READERS[forms[0]](value[forms[0]])


def _from_file(path: Path) -> TokenTree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(f"{str(path)!r} can't be read ({error}); use {FORMS}.") from None
    try:
        return _from_json(text)
    except TreeError as error:
        raise TreeError(f"In the file {str(path)!r}: {error}") from None


def _from_json(text: str) -> TokenTree:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TreeError(f"The text is not JSON ({error}); use {FORMS}.") from None
    if not isinstance(value, list | dict):
        raise TreeError(
            f"The JSON is {shown(value)}; use a list of paths or a dict, as in {FORMS}."
        )
    return read_tree(value)
