"""Step costs on disk, by what they are of: a server that starts again need not learn them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.files import FileRefused, digest_json, read_json, write_json

_FORMAT = 2


def cost_path(folder: Path, what: Mapping[str, str]) -> Path:
    """Where costs are kept.

    Args:
        folder: of the cache; it need not exist.
        what: they are of, such as model, device, dtype and versions; other values, other file.

    """
    return folder / f"step-cost-{digest_json(dict(what))[:20]}.json"


def load_cost(path: Path, what: Mapping[str, str], max_rows: int) -> tuple[StepCost, str]:
    """Return the costs kept at ``path`` and "", or new ones and the reason.

    A file that isn't there is no reason.
    """
    new = StepCost(max_rows)
    try:
        if not path.exists():
            return new, ""
        document = read_json(path)
        if document.get("format") != _FORMAT or document.get("of") != dict(what):
            return new, f"{path} is of something else."
        cost = StepCost.from_dict(document)
    except (OSError, ValueError, RecursionError) as error:
        return new, f"{path} can't be used: {error}"
    return (cost, "") if cost.max_rows == new.max_rows else (new, f"{path} is of other sizes.")


@dataclass(frozen=True)
class Kept:
    """Costs on disk."""

    of: Mapping[str, str]
    cost: StepCost
    written: float  # seconds since 1970


def kept_costs(place: Path) -> list[Kept]:
    """All that can be read in a folder, or in a file; the latest first."""
    found = []
    for path in sorted(place.glob("step-cost-*.json")) if place.is_dir() else [place]:
        try:
            document = read_json(path)
            if document.get("format") == _FORMAT and isinstance(of := document.get("of"), dict):
                cost = StepCost.from_dict(document)
                found.append(Kept(of, cost, path.stat().st_mtime))
        except (OSError, ValueError, RecursionError):
            continue  # an engine would measure it anew
    return sorted(found, key=lambda kept: -kept.written)


def save_cost(path: Path, what: Mapping[str, str], cost: StepCost, tag: str = "part") -> str:
    """Write the costs, and return ""; or why they can't be kept.

    Args:
        path: as `cost_path` says.
        what: as there.
        cost: what to write.
        tag: differs between processes that may write at a time.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": _FORMAT, "of": dict(what)} | cost.to_dict(), tag)
    except (OSError, FileRefused) as error:
        return f"{path} can't be written: {error}"
    return ""
