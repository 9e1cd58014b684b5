"""`vllm-medusa inspect`: what a checkpoint is, and whether it fits a target."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.options import Options, Source, option

if TYPE_CHECKING:
    from vllm_medusa.heads import HeadsInfo
    from vllm_medusa.heads.inspection import Check, Inspection

TEXT = """\
Tell what a checkpoint of Medusa heads holds, where it comes from, whether anything about it is odd
(every value is looked at), and, with --target, whether it fits that model. Of an EAGLE drafter the
config and the headers are looked at.

Exit status: 0 it fits, 1 it does not, 2 it is not a checkpoint of heads, or --target
is not a model."""

_MARKS = {"fits": "ok ", "does not fit": "NO ", "unknown": "?  "}
_FORMATS = {
    "v1": "v1 (the reference's names; TGI and TensorRT-LLM have the same)",
    "v2": "v2 (residual blocks alone; the target's LM head is used)",
    "vllm": "vLLM's layout (which this package saves)",
    "hydra": "Hydra's MLP variant (the reference's names, and what this package saves)",
    "full": "full Medusa-2 model (heads and the model they were trained with)",
}
_SHOWN_NODES = 40


class InspectOptions(Options):
    """Options of `vllm-medusa inspect`."""

    path: Source = option("the heads: a folder, a file or a hub name", positional=True)
    target: Source | None = option("the model they are meant for", default=None)
    revision: str | None = option("branch, tag or commit of a hub name", default=None)
    json: bool = option("for programs", default=False)


def run(options: InspectOptions, progress: ConsoleProgress) -> int:
    """Inspect, and print what was found; returns the exit status."""
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
    lines = _lines(found, options.target)
    print(json.dumps(found.to_dict(), indent=2) if options.json else "\n".join(lines))
    return 0 if found.fits else 1


def _something_else(path: Path) -> str | None:
    """What a file or folder is that only looks like a checkpoint, and the remedy; None: nothing."""
    gguf = next(path.glob("*.gguf"), None) if path.is_dir() else path
    files = list(path.iterdir()) if path.is_dir() else []
    if gguf is not None and gguf.is_file() and not any(f.suffix == ".safetensors" for f in files):
        with gguf.open("rb") as file:
            if file.read(4) == b"GGUF":
                return (
                    f"{gguf}: a GGUF file, a whole model in llama.cpp's format, neither heads nor "
                    "a target that can be served here. Use the model that it was made from, or "
                    "save it as a folder: AutoModelForCausalLM.from_pretrained(FOLDER, "
                    "gguf_file=NAME).save_pretrained(TARGET), and its tokenizer likewise."
                )
    weights = path / "model.safetensors" if path.is_dir() else path
    if weights.suffix == ".safetensors" and weights.is_file():
        from safetensors import SafetensorError, safe_open

        with contextlib.suppress(SafetensorError), safe_open(weights, "np") as file:
            if "packed" in (file.metadata() or {}):
                return (
                    f"{path}: a drafter packed as int8 for the demo, which no engine loads. `make "
                    "demo` unpacks it: use the folder of that name in .demo/drafters."
                )
    return None


def _eagle(options: InspectOptions) -> int | None:
    """Print what an EAGLE drafter is; the exit status, or None if there is none at the path."""
    from vllm_medusa.heads import HeadsError
    from vllm_medusa.heads.eagle import inspect_eagle

    try:
        found = inspect_eagle(options.path, options.target, revision=options.revision)
    except (HeadsError, OSError):
        return None
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0 if found.fits else 1
    print(f'{found.source}: an EAGLE drafter ("method": "{found.method}")')
    rows = {
        "hidden size": f"{found.target_hidden_size}, of the target",
        "vocabulary": f"{found.vocab_size}, of which it drafts {found.draft_vocab_size}",
        "stored": f"{found.parameters:,} parameters",
    }
    if found.method == "eagle3":
        layers = "not given" if found.layers is None else ", ".join(map(str, found.layers))
        rows["reads"] = f"the inputs of the target's layers {layers}"
    print("\n".join(f"  {key:12} {value}" for key, value in rows.items()))
    print("\n".join(_verdicts(found.checks, options.target, found.fits)))
    return 0 if found.fits else 1


def _target(options: InspectOptions) -> dict[str, Any] | None:
    """What is at the path, if that is a target; None: heads, so something else went wrong."""
    from vllm_medusa.heads import HeadsError, peek_heads, target_fingerprint

    with contextlib.suppress(HeadsError, OSError):
        peek_heads(options.path, revision=options.revision)
        return None
    with contextlib.suppress(HeadsError):
        return target_fingerprint(options.path)
    return None


def _verdicts(checks: Iterable[Check], target: str | None, fits: bool) -> Iterator[str]:
    unsure = ""
    for check in checks:
        yield f"{_MARKS[check.verdict]}{check.name}: {check.text}"
        if check.verdict == "unknown":
            unsure = ", as far as can be told"
    if target is not None:
        yield f"{target}: {f'it fits{unsure}' if fits else 'IT DOES NOT FIT'}"


def _lines(found: Inspection, target: str | None) -> Iterator[str]:
    info = found.info
    yield f"{found.source}: {'Hydra' if info.is_hydra else 'Medusa'} heads"
    rows = {
        "format": _FORMATS[info.format],
        "files": ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in found.files.items()),
        "heads": f"{info.num_heads}, each of {info.num_layers} residual layers "
        f"{'with' if info.bias else 'without'} biases",
        "LM heads": _lm_heads(found),
        "hidden size": info.hidden_size,
        "vocabulary": _vocabulary(info),
        "stored": f"{found.parameters:,} parameters, {found.bytes / 1e6:.1f} MB, "
        + " and ".join(found.dtypes),
        "base model": info.base_model or "not given",
    }
    yield from (f"  {key:12} {value}" for key, value in rows.items())
    yield from _tree(found)
    for key in ("target", "calibration", "training"):
        if isinstance(value := info.medusa.get(key), Mapping):
            yield f"  {key}"
            yield from (f"    {name}: {_short(entry)}" for name, entry in value.items())
    yield from _provenance(info.medusa.get("provenance"))
    for text in found.damage:
        yield f"DAMAGED: {text}"
    for text in found.suspicions:
        yield f"odd: {text}"
    yield from _verdicts(found.checks, target, found.fits)


def _lm_heads(found: Inspection) -> str:
    info = found.info
    if info.num_lm_heads == 0:
        text = "none stored; the target's is used"
        if info.format == "vllm":  # which stock vLLM would load, with LM heads at random
            text += " (vLLM without this plugin needs a copy: convert --to vllm)"
    elif info.num_lm_heads == 1 < info.num_heads:
        text = f"one for all heads, {info.lm_head_rows} rows"
    else:
        text = f"one for each head, {info.lm_head_rows} rows"
    text += ", with biases" if info.lm_head_bias else ""
    return text


def _vocabulary(info: HeadsInfo) -> str:
    """The target's, and what heads draft of it; training's notes have the share of the texts."""
    text = "not given" if info.vocab_size is None else str(info.vocab_size)
    if not info.token_map:
        return text
    text += f", of which they draft {info.draft_vocab_size} (token_map)"
    training = info.medusa.get("training")
    noted = training.get("draft_vocab") if isinstance(training, Mapping) else None
    if isinstance(noted, Mapping):
        for key, texts in (("coverage", "the texts"), ("heldout_coverage", "held-out ones")):
            if isinstance(noted.get(key), float):
                text += f", {noted[key]:.1%} of {texts}"
    return text


def _tree(found: Inspection) -> Iterator[str]:
    from vllm_medusa.calibration.sketch import sketch_tree

    tree = found.tree
    if tree is None:
        yield f"  {'tree':12} {'none of its own' if found.info.tree is None else 'unreadable'}"
        return
    yield f"  {'tree':12} {tree.num_draft_tokens} draft nodes, depth {tree.max_depth}"
    drawing = sketch_tree(tree.to_lists())
    yield from (f"    {line}" for line in drawing[:_SHOWN_NODES])
    if len(drawing) > _SHOWN_NODES:
        yield f"    ... {len(drawing) - _SHOWN_NODES} more nodes"


def _provenance(entries: object) -> Iterator[str]:
    if not isinstance(entries, list) or not entries:
        return
    yield "  provenance"
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        command = entry.get("command")
        words = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        versions = entry.get("versions")
        ours = versions.get("vllm-medusa", "?") if isinstance(versions, Mapping) else "?"
        yield f"    {entry.get('time', '?')}, version {ours}: {words}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
