"""`vllm-medusa inspect`: describe a checkpoint, and check that it fits a target."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.options import Options, Source, option

if TYPE_CHECKING:
    from vllm_medusa.heads.eagle import EagleInspection
    from vllm_medusa.heads.inspection import Inspection

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
    target: Source | None = option("the target model to check against", default=None)
    revision: str | None = option("branch, tag or commit of a hub name", default=None)
    json: bool = option("for programs", default=False)


def run(options: InspectOptions, progress: ConsoleProgress) -> int:
    """Inspect, and print the results; returns the exit status."""
    from vllm_medusa.heads import HeadsError
    from vllm_medusa.heads.inspection import inspect_heads

    if other := _something_else(Path(options.path).expanduser()):
        print(json.dumps({"source": options.path, "error": other}) if options.json else other)
        return 2
    try:
        found = inspect_heads(
            options.path,
            options.target,
            revision=options.revision,
            progress=lambda done, total: progress.at("reading", done / 1e6, total / 1e6, "MB"),
        )
    except (HeadsError, OSError) as error:
        if (status := _eagle(options)) is not None:
            return status
        target = _target(options)
        if options.json:
            print(json.dumps({"source": options.path, "error": str(error), "target": target}))
        elif target is None:
            raise
        else:
            print(f"{options.path}: a target model, not heads")
            print("\n".join(f"  {key:14} {value}" for key, value in target.items()))
        return 2
    return _print(f"{'Hydra' if found.info.is_hydra else 'Medusa'} heads", found, options)


def _something_else(path: Path) -> str | None:
    """Describe a file or folder that only resembles a checkpoint, with a remedy; else None."""
    gguf = next(path.glob("*.gguf"), None) if path.is_dir() else path
    files = list(path.iterdir()) if path.is_dir() else []
    if gguf is not None and gguf.is_file() and not any(f.suffix == ".safetensors" for f in files):
        with gguf.open("rb") as file:
            if file.read(4) == b"GGUF":
                return (
                    f"{gguf}: a GGUF file, a whole model in llama.cpp's format, neither heads nor "
                    "a supported target. Use the model that it was made from, or "
                    "save it as a folder: AutoModelForCausalLM.from_pretrained(FOLDER, "
                    "gguf_file=NAME).save_pretrained(TARGET), and its tokenizer likewise."
                )
    weights = path / "model.safetensors" if path.is_dir() else path
    if weights.suffix == ".safetensors" and weights.is_file():
        from safetensors import SafetensorError, safe_open

        with contextlib.suppress(SafetensorError), safe_open(weights, "np") as file:
            if "packed" in (file.metadata() or {}):
                return (
                    f"{path}: a drafter packed as int8 for the demo; engines can't load it. `make "
                    "demo` unpacks it: use the folder of the same name in .demo/drafters."
                )
    return None


def _eagle(options: InspectOptions) -> int | None:
    """Describe an EAGLE drafter; returns the exit status, or None if the path has none."""
    from vllm_medusa.heads import HeadsError
    from vllm_medusa.heads.eagle import inspect_eagle

    try:
        found = inspect_eagle(options.path, options.target, revision=options.revision)
    except (HeadsError, OSError):
        return None
    return _print("an EAGLE drafter", found, options)


def _target(options: InspectOptions) -> dict[str, Any] | None:
    """Describe the path if it is a target model, else return None."""
    from vllm_medusa.heads import HeadsError, peek_heads, target_fingerprint

    with contextlib.suppress(HeadsError, OSError):
        peek_heads(options.path, revision=options.revision)
        return None
    with contextlib.suppress(HeadsError):
        return target_fingerprint(options.path)
    return None


def _print(what: str, found: Inspection | EagleInspection, options: InspectOptions) -> int:
    """Print all information; returns the exit status."""
    document = found.to_dict()
    print(
        json.dumps(document, indent=2)
        if options.json
        else "\n".join([f"{options.path}: {what}", *_lines(document, options.target)])
    )
    return 0 if found.fits else 1


def _lines(document: dict[str, Any], target: str | None) -> Iterator[str]:
    from vllm_medusa.calibration.sketch import sketch_tree

    tree, medusa = document.get("tree"), document.get("medusa") or {}
    for key, value in document.items():
        if key not in ("source", "fits", "checks", "damage", "tree", "medusa"):
            yield f"  {key:20} {_short(value)}"
    if "tree" in document:
        yield f"  {'tree':20} {f'{len(tree)} draft nodes' if tree else 'none'}"
        yield from (f"    {line}" for line in sketch_tree(tree or [])[1 : _SHOWN_NODES + 1])
    for key, value in medusa.items():
        if key == "provenance" and isinstance(value, list):
            made = [entry for entry in value if isinstance(entry, Mapping)]
            value = {e.get("time"): " ".join(map(str, e.get("command") or [])) for e in made}
        if isinstance(value, Mapping):
            yield f"  {key}"
            yield from (f"    {name}: {_short(entry)}" for name, entry in value.items())
        else:
            yield f"  {key:20} {_short(value)}"
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
