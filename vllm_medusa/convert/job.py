"""The convert job, from options to the output folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_medusa.convert.eagle import DRAFTER_FORMATS, write_drafter
from vllm_medusa.convert.heads import FORMATS, write_heads
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.files import new_folder, refuse_strangers
from vllm_medusa.heads.checkpoint import (
    FORMAT_VERSION,
    HeadsInfo,
    config_text,
    peek_heads,
    provenance_of,
    require_fit,
)
from vllm_medusa.heads.eagle_checkpoint import drafter_method
from vllm_medusa.heads.files import find_checkpoint, find_target, is_drafter
from vllm_medusa.heads.fingerprint import config_sizes, match_target, target_fingerprint
from vllm_medusa.heads.model import HeadsError

_WEIGHTS = (*{form.file for form in FORMATS.values()}, "pytorch_model.bin")


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion, with notes and warnings."""

    info: HeadsInfo | None  # of the source; None: an EAGLE-3 drafter
    file: Path
    bytes: int
    notes: list[str]
    warnings: list[str]


def convert(options: ConvertOptions, *, provenance: Mapping[str, Any] | None = None) -> Conversion:
    """Write heads in another format.

    An existing output is replaced only with ``overwrite``, and only if it contains nothing but
    heads. ``provenance`` is an entry to append to that of the heads.

    Raises:
        HeadsError: heads that are unreadable, or not supported by the format.
        FileRefused: an output that exists or can't be created. Nothing is written in either case.

    """
    source, output = options.source, options.output
    files = find_checkpoint(source, options.revision)
    target = None if options.target is None else find_target(options.target)
    info = None if is_drafter(files) else peek_heads(files)
    what, formats = ("heads", FORMATS) if info else ("EAGLE drafters", DRAFTER_FORMATS)
    if options.to not in formats:
        raise HeadsError(
            f"{source} can't be written as {options.to}: {what} can be written as "
            f"{', '.join(formats)}"
        )
    _check_output(options)
    warnings: list[str] = []
    if info is None:
        made = write_drafter(options.to, files, target)
        medusa = dict(made.config.get("medusa") or {})
    else:
        if info.is_hydra:
            raise HeadsError(f"{source} holds Hydra heads, which have one layout: use them as is")
        if target is not None:
            sizes = config_sizes(target.config)
            require_fit(info, sizes["hidden_size"], sizes["vocab_size"])
        made = write_heads(options.to, info, target)
        medusa = dict(info.medusa)
        own = info.includes_base and Path(source).expanduser().is_dir()
        known = source if own else options.target
        if known is not None:
            match = match_target(info.files, known)
            if not match.stored:
                medusa["target"] = target_fingerprint(known)
            elif match.warning:
                warnings.append(match.warning)
    medusa = {"format_version": FORMAT_VERSION, **medusa}
    if provenance is not None:
        medusa["provenance"] = [*provenance_of(medusa), dict(provenance)]
    text = config_text(made.config | {"medusa": medusa}, output / "config.json")
    if info is not None and info.includes_base:
        warnings.append(
            "These heads were trained together with the model in the same checkpoint, which "
            "differs from its original: serve them with that model. "
            f"AutoModelForCausalLM.from_pretrained({str(source)!r}).save_pretrained(FOLDER) writes "
            "it alone."
        )
    with new_folder(output, overwrite=options.overwrite) as part:
        path = part / made.file
        if made.file.endswith(".safetensors"):
            save_file({n: t.clone() for n, t in made.tensors.items()}, path, {"format": "pt"})
        else:  # copies of one tensor are stored once
            torch.save(made.tensors, path)
        size = path.stat().st_size
        (part / "config.json").write_text(text, encoding="utf-8")
    return Conversion(info, output / made.file, size, made.notes, warnings)


def _check_output(options: ConvertOptions) -> None:
    """Refuse an output that exists, has other contents than heads, or overlaps the source."""
    path = options.output
    place = path.resolve()
    for name in filter(None, (options.source, options.target)):
        read = Path(name).expanduser()
        folder = (read.parent if read.is_file() else read).resolve()
        if place == folder or (read.is_dir() and place.is_relative_to(folder)):
            raise HeadsError(
                f"{path} is, or is inside, {folder}, which is being read: choose another output"
            )
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        raise HeadsError(f"{path} is not a folder: choose another output")
    if not options.overwrite:
        raise HeadsError(f"{path} exists: choose another output, or pass --overwrite to replace it")
    refuse_strangers(path, ("config.json", *_WEIGHTS))
    entries = sorted(path.iterdir())
    if drafter_method(path) is None:
        for file in [entry for entry in entries if entry.name in _WEIGHTS] or entries:
            if peek_heads(file).includes_base:  # and raises for other contents
                raise HeadsError(f"{file} also holds a model: choose another output, or move it")
