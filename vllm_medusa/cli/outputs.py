"""Files that a command may replace: those it wrote itself, told by what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LARGEST = 1 << 24  # bytes; what is written here is far smaller, and a model is not read


def check_json(path: Path, what: str, ours: Callable[[dict[str, Any]], bool]) -> None:
    """Refuse an output that exists, unless it is empty or a JSON object that is ``ours``.

    Args:
        path: the output.
        what: what the command writes there, in words.
        ours: whether an object looks like that.

    Raises:
        ValueError: something else is there.

    """
    if os.path.lexists(path) and not _replaceable(path, ours):
        raise ValueError(
            f"{path} exists and holds no {what} written by this command, so it is not replaced: "
            "name another file, or remove it yourself."
        )


def _replaceable(path: Path, ours: Callable[[dict[str, Any]], bool]) -> bool:
    if not path.is_file() or (size := path.stat().st_size) > _LARGEST:
        return False
    try:
        document = json.loads(path.read_bytes()) if size else None
    except (ValueError, RecursionError):
        return False
    return size == 0 or (isinstance(document, dict) and ours(document))
