"""The convert job, from options to the output folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.convert.eagle import DRAFTER_FORMATS, write_drafter
from vllm_medusa.convert.heads import FORMATS, write_heads
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.files import new_folder, new_path, refuse_strangers
from vllm_medusa.heads.checkpoint import (
    FORMAT_VERSION,
    HeadsInfo,
    config_text,
    describe,
    peek_heads,
    provenance_of,
    require_fit,
)
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint, find_target
from vllm_medusa.heads.fingerprint import config_sizes, match_target, target_fingerprint
from vllm_medusa.heads.formats import is_head_tensor
from vllm_medusa.heads.model import HeadsError

_WEIGHTS = (*{form.file for form in FORMATS.values()}, "pytorch_model.bin")
_WEIGHT_FILES = (".bin", ".safetensors", ".pt", ".index.json")


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

    An existing output is replaced only with ``overwrite``, and only if it holds heads and
    nothing else. ``provenance`` is an entry to append to that of the heads.

    Raises:
        HeadsError: heads that are unreadable, or not supported by the format.
        FileRefused: an output that exists or can't be created. Nothing is written in either case.

    """
    source, output, base = options.source, options.output, options.base
    files = find_checkpoint(source, options.revision)
    target = None if options.target is None else find_target(options.target)
    is_drafter = "fc.weight" in {name.rsplit("model.", 1)[-1] for name in files.files}
    what, formats = ("EAGLE drafters", DRAFTER_FORMATS) if is_drafter else ("heads", FORMATS)
    if options.to not in formats:
        raise HeadsError(
            f"{source} can't be written as {options.to}: {what} can be {', '.join(formats)}"
        )
    for path in (output, base):
        if path is not None:
            _check_output(path, options, overwrite=options.overwrite and path is output)
    warnings: list[str] = []
    info = None if is_drafter else describe(files)
    if base is not None:
        _check_base(info, options, base)
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
            match = match_target(info, known, heads=source)
            if not match.stored:
                medusa["target"] = target_fingerprint(known)
            elif match.warning:
                warnings.append(match.warning)
    medusa = {"format_version": FORMAT_VERSION, **medusa}
    if provenance is not None:
        medusa["provenance"] = [*provenance_of(medusa), dict(provenance)]
    text = config_text(made.config | {"medusa": medusa}, output / "config.json")
    if base is not None:
        warnings += _write_base(files, base)
    elif info is not None and info.includes_base:
        warnings.append(
            "These heads were trained together with the model in the same checkpoint, which "
            "differs from its original: serve them with that model. --base FOLDER writes "
            "it alone."
        )
    with new_folder(output, overwrite=options.overwrite) as part:
        _write(made.tensors, part / made.file)
        size = (part / made.file).stat().st_size
        (part / "config.json").write_text(text, encoding="utf-8")
    return Conversion(info, output / made.file, size, made.notes, warnings)


def _check_output(path: Path, options: ConvertOptions, *, overwrite: bool) -> None:
    """Refuse an output that exists, has other contents than heads, or overlaps the source."""
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
    if not overwrite:
        raise HeadsError(f"{path} exists: choose another output, or pass --overwrite to replace it")
    if not path.is_dir() or path.is_symlink():
        raise HeadsError(
            f"{path} is not a folder, and --overwrite only replaces such folders: choose another "
            "output"
        )
    refuse_strangers(path, ("config.json", *_WEIGHTS))
    entries = sorted(path.iterdir())
    weights = [entry for entry in entries if entry.name in _WEIGHTS]
    for file in weights or entries:
        try:
            alone = drafter_method(path) is not None or not peek_heads(file).includes_base
        except HeadsError:
            alone = False
        if not alone:
            raise HeadsError(
                f"{file} has contents other than heads, and --overwrite replaces nothing "
                "else: choose another output, or move it away"
            )


def _check_base(info: HeadsInfo | None, options: ConvertOptions, base: Path) -> None:
    first, second = options.output.resolve(), base.resolve()
    if info is None or not info.includes_base:
        raise HeadsError(f"{options.source} holds only heads: there is no base to write to {base}")
    if not Path(options.source).expanduser().is_dir():
        raise HeadsError(
            f"{options.source} is not a folder: --base needs the whole checkpoint. Download it and "
            "pass its folder"
        )
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise HeadsError(
            f"{options.output} and {base} are the same folder, or one contains the other: use "
            "separate folders"
        )


def _write_base(files: CheckpointFiles, output: Path) -> list[str]:
    """Write the base of a full Medusa-2 model, one file per shard; returns warnings.

    Tensors keep their names, values and dtypes; Medusa's keys are removed from config.json, and
    other files (tokenizer, generation settings) are copied unchanged.
    """
    names = [name for name in files.files if not is_head_tensor(name)]
    shards = sorted({files.files[name] for name in names})
    for path in shards:
        if not path.is_file():
            raise HeadsError(f"{path} is missing, but holds a part of the base: download it")
    config = {
        key: value for key, value in files.config.items() if not key.lower().startswith("medusa")
    }
    with new_folder(output) as part:
        weight_map: dict[str, str] = {}
        total = 0
        for number, path in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = file if len(shards) > 1 else "model.safetensors"
            tensors = dict(files.tensors(n for n in names if files.files[n] == path))
            _write(tensors, part / file)
            total += sum(tensor.nbytes for tensor in tensors.values())
            weight_map |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2)
            (part / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        for entry in sorted(shards[0].parent.iterdir()):
            left_out = entry.name == "config.json" or entry.name.endswith(_WEIGHT_FILES)
            if entry.is_file() and not left_out:
                shutil.copyfile(entry, part / entry.name)
        (part / "config.json").write_text(config_text(config, output), encoding="utf-8")
    named = config.get("architectures")
    odd = [name for name in named or () if "medusa" in str(name).lower()]
    return [
        f"The base's config.json has the architecture {name}: change it to the plain model's "
        "before loading it."
        for name in odd
    ]


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors with default permissions; in pickles, copies are stored once."""
    pickled = path.suffix != ".safetensors"
    own: dict[object, Tensor] = {}
    kept = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        key = same if pickled else name
        if key not in own:  # without the memory behind a view
            own[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
        kept[name] = own[key]
    with new_path(path) as part:
        if pickled:
            torch.save(kept, part)
        else:
            save_file(kept, part, {"format": "pt"})
