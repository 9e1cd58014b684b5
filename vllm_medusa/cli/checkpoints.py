"""`vllm-medusa convert` and `inspect`: checkpoints of heads and drafters."""

from __future__ import annotations

import json
from typing import Any

from vllm_medusa.cli.console import ConsoleProgress, drawn_tree, invocation, stdout_console
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.options import Model, Options, Source, option

CONVERT = """\
Write heads, or an EAGLE-3 drafter, in another format. The source format, or a full Medusa-2 model,
is detected from its tensors. Tensors are copied unchanged, each in its own dtype; tensors that a
format does not support are refused, and missing ones are added and reported.
---
formats:
  native        this package's format: vLLM's layout with additional fields
  vllm          for vLLM without this plugin: with a copy of the target's LM head if it is shared
  v1            the reference's medusa_lm_head.pt: biases, an LM head for each head
  v2            the residual blocks alone; the target's LM head is used
  tgi           Text Generation Inference
  tensorrt-llm  TensorRT-LLM
for EAGLE-3 drafters (also native):
  safeailab     the reference's pytorch_model.bin
  specforge     SpecForge and SGLang; --target determines layer indices
  speculators   vLLM's speculators library"""

INSPECT = """\
Describe a checkpoint of heads or of an EAGLE drafter: its contents, whether a value is NaN or
infinite, and, with --target, whether it fits that model. For a target with an MTP module: whether
its tensors are complete and trees support it.

Exit status: 0 if it fits, 1 if not, 2 if it is not such a checkpoint or --target is not a model."""

_MARKS = {"fits": "ok ", "does not fit": "NO ", "unknown": "?  "}
_SHOWN_NODES = 40
_SHOWN_OTHERWISE = ("source", "fits", "damage", "checks", "tree")


def run_convert(options: ConvertOptions, progress: ConsoleProgress) -> int:
    """Convert, and print the result."""
    from vllm_medusa.convert.job import convert
    from vllm_medusa.heads.provenance import provenance

    done = convert(options, provenance=provenance(invocation()))
    info = done.info
    size = f"{done.bytes / 1e6:.1f} MB"
    if info is None:
        print(f"{done.file}: an EAGLE-3 drafter as {options.to}, {size}")
    else:
        print(
            f"{done.file}: {info.num_heads} heads of {info.num_layers} layers as {options.to} "
            f"(from {info.format}), {size}"
        )
    for note in done.notes:
        print(f"note: {note}")
    for warning in done.warnings:
        progress.warn(warning)
    return 0


class InspectOptions(Options):
    """Options of `vllm-medusa inspect`."""

    path: Source = option(
        "heads, a drafter or a target with MTP: a folder, a file or a hub name", positional=True
    )
    target: Model | None = option("the target model to check against", default=None)
    revision: str | None = option("branch, tag or commit of a hub name", default=None)
    json: bool = option("print everything as JSON", default=False)


def run_inspect(options: InspectOptions, progress: ConsoleProgress) -> int:
    """Inspect, and print the results; returns the exit status."""
    from vllm_medusa.heads.eagle_checkpoint import EagleInspection, inspect_eagle
    from vllm_medusa.heads.files import find_checkpoint, is_drafter
    from vllm_medusa.heads.inspection import Inspection, inspect_heads
    from vllm_medusa.heads.model import HeadsError
    from vllm_medusa.heads.mtp import MtpInspection, inspect_mtp

    found: Inspection | EagleInspection | MtpInspection | None
    places = options.path, options.target

    def reading(done: int, total: int) -> None:
        progress.at("reading", done / 1e6, total / 1e6, "MB")

    given: dict[str, Any] = {"revision": options.revision, "progress": reading}
    try:
        files = find_checkpoint(options.path, options.revision)
        if is_drafter(files):
            found, what = inspect_eagle(*places, **given), "an EAGLE drafter"
        elif (found := inspect_mtp(files, reading)) is not None:
            what = "a target with MTP"
            if options.target is not None:
                raise HeadsError(f"{options.path} contains its own drafter: omit --target")
        else:
            found = inspect_heads(*places, **given)
            what = f"{'Hydra' if found.info.is_hydra else 'Medusa'} heads"
    except (HeadsError, OSError) as error:
        if not options.json:
            raise
        print(json.dumps({"source": options.path, "error": str(error)}))
        return 2
    document = found.to_dict()
    if options.json:
        print(json.dumps(document, indent=2))
        return 0 if found.fits else 1
    print(f"{options.path}: {what}")
    for text in document.get("damage", ()):
        print(f"DAMAGED: {text}")
    for check in document["checks"]:
        print(f"{_MARKS[check['verdict']]}{check['name']}: {check['text']}")
    if options.target is not None:
        unsure = any(check["verdict"] == "unknown" for check in document["checks"])
        fits = "it fits, as far as is known" if unsure else "it fits"
        print(f"{options.target}: {fits if found.fits else 'IT DOES NOT FIT'}")
    print("details (everything: --json)")
    medusa = document.pop("medusa", {})
    document |= {key: value for key, value in medusa.items() if not isinstance(value, dict | list)}
    for key, value in document.items():
        if value is not None and key not in _SHOWN_OTHERWISE:
            named = isinstance(value, dict)
            text = ", ".join(f"{n} {v}" for n, v in value.items()) if named else str(value)
            print(f"  {key:20} {text}")
    if tree := document.get("tree"):
        print(f"  {'tree':20} {len(tree)} draft nodes")
        stdout_console().print(drawn_tree(tree[:_SHOWN_NODES]))
    return 0 if found.fits else 1
