"""`vllm-medusa inspect`: describe a checkpoint, and check that it fits a target."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_medusa.cli.console import ConsoleProgress, drawn_tree, stdout_console
from vllm_medusa.options import Model, Options, Source, option

TEXT = """\
Describe a checkpoint of Medusa heads: its contents, its provenance, whether a value is damaged,
and, with --target, whether it fits that model. For an EAGLE drafter, the config and the headers are
checked.

Exit status: 0 it fits, 1 it does not, 2 it is not a checkpoint of heads, or --target
is not a model."""

_MARKS = {"fits": "ok ", "does not fit": "NO ", "unknown": "?  "}
_SHOWN_NODES = 40
_SHOWN = 90  # characters of a value


class InspectOptions(Options):
    """Options of `vllm-medusa inspect`."""

    path: Source = option("the heads: a folder, a file or a hub name", positional=True)
    target: Model | None = option("the target model to check against", default=None)
    revision: str | None = option("branch, tag or commit of a hub name", default=None)
    json: bool = option("for programs", default=False)


def run(options: InspectOptions, progress: ConsoleProgress) -> int:
    """Inspect, and print the results; returns the exit status."""
    from vllm_medusa.heads.eagle import EagleInspection, inspect_eagle
    from vllm_medusa.heads.inspection import Inspection, inspect_heads
    from vllm_medusa.heads.model import HeadsError

    found: Inspection | EagleInspection
    places = options.path, options.target
    try:
        found = inspect_heads(
            *places,
            revision=options.revision,
            progress=lambda done, total: progress.at("reading", done / 1e6, total / 1e6, "MB"),
        )
        what = f"{'Hydra' if found.info.is_hydra else 'Medusa'} heads"
    except (HeadsError, OSError) as error:
        try:
            found, what = inspect_eagle(*places, revision=options.revision), "an EAGLE drafter"
        except (HeadsError, OSError):
            if not options.json:
                raise error from None
            print(json.dumps({"source": options.path, "error": str(error)}))
            return 2
    document = found.to_dict()
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print("\n".join([f"{options.path}: {what}", *_described(document)]))
        if tree := document.get("tree"):
            stdout_console().print(drawn_tree(tree[:_SHOWN_NODES]))
        for line in _checked(document, options.target):
            print(line)
    return 0 if found.fits else 1


def _described(document: dict[str, Any]) -> Iterator[str]:
    tree, medusa = document.get("tree"), document.get("medusa") or {}
    for key, value in document.items():
        if key not in ("source", "fits", "checks", "damage", "tree", "medusa"):
            yield f"  {key:20} {_short(value)}"
    if "tree" in document:
        yield f"  {'tree':20} {f'{len(tree)} draft nodes' if tree else 'none'}"
    for key, value in medusa.items():
        if key == "provenance" and isinstance(value, list):
            made = [entry for entry in value if isinstance(entry, Mapping)]
            value = {e.get("time"): " ".join(map(str, e.get("command") or [])) for e in made}
        if isinstance(value, Mapping):
            yield f"  {key}"
            yield from (f"    {name}: {_short(entry)}" for name, entry in value.items())
        else:
            yield f"  {key:20} {_short(value)}"


def _checked(document: dict[str, Any], target: str | None) -> Iterator[str]:
    yield from (f"DAMAGED: {text}" for text in document.get("damage", ()))
    unsure = ""
    for check in document["checks"]:
        yield f"{_MARKS[check['verdict']]}{check['name']}: {check['text']}"
        if check["verdict"] == "unknown":
            unsure = ", as far as is known"
    if target is not None:
        yield f"{target}: {f'it fits{unsure}' if document['fits'] else 'IT DOES NOT FIT'}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
