"""One conversion, from what is asked to the folder written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_medusa.convert import reference, vllm
from vllm_medusa.convert.backbone import write_base
from vllm_medusa.convert.eagle import DRAFTER_FORMATS, Drafter
from vllm_medusa.convert.folder import check_apart, check_output, copy_calibration, write_output
from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.files import new_folder
from vllm_medusa.heads.checkpoint import FORMAT_VERSION
from vllm_medusa.heads.files import (
    CheckpointFiles,
    download_whole,
    find_checkpoint,
    find_target,
)
from vllm_medusa.heads.fingerprint import match_target, target_fingerprint
from vllm_medusa.heads.formats import Layout
from vllm_medusa.heads.info import HeadsInfo, check_vocab, read_heads, read_token_map
from vllm_medusa.heads.model import HeadsError

FORMATS: dict[str, Callable[[Heads, TargetWeights | None], Output]] = {
    "native": vllm.write_native,
    "vllm": vllm.write,
    "v1": reference.write_v1,
    "v2": reference.write_v2,
    "tgi": reference.write_tgi,
    "tensorrt-llm": reference.write_tensorrt_llm,
}


@dataclass(frozen=True)
class Conversion:
    """What was converted, and what a user should know of it."""

    info: HeadsInfo | None  # of the source; None: an EAGLE-3 drafter
    file: Path
    bytes: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def convert(options: ConvertOptions, *, provenance: Mapping[str, Any] | None = None) -> Conversion:
    """Write heads in another format.

    An output that exists is replaced only with ``overwrite``, and only if it holds heads and
    nothing else. ``provenance`` is an entry to append to the heads' own.

    Raises:
        HeadsError: heads that can't be read, or that the format can't express.
        FileRefused: an output that exists or can't be made. Nothing is written in either case.

    """
    source, output, base = options.source, options.output, options.base
    files = find_checkpoint(source, options.revision)
    is_drafter = "fc.weight" in {name.rsplit("model.", 1)[-1] for name in files.files}
    if options.to not in (DRAFTER_FORMATS if is_drafter else FORMATS):
        what, others = ("EAGLE drafters", DRAFTER_FORMATS) if is_drafter else ("heads", FORMATS)
        raise HeadsError(
            f"{source} can't be written as {options.to}: {what} can be {', '.join(others)}"
        )
    folder = _folder_of(source)
    whole = None if Path(source).expanduser() != folder else folder
    for path in (output, base):
        if path is not None:
            replace_it = options.overwrite and path is output
            check_output(path, whole, overwrite=replace_it, sources=[folder, options.target])
    if is_drafter:
        return _convert_drafter(options, files, provenance)
    files, layout, info = read_heads(files)
    if base is not None:
        check_apart(output, base)
    if base is not None and not info.includes_base:
        raise HeadsError(f"{source} holds heads only: there is no base to write to {base}")
    weights = None if options.target is None else TargetWeights(options.target)
    if weights is not None:
        _check_target(files, layout, info, weights)
    if base is not None and folder is None:
        files = download_whole(files, options.revision)
    heads = Heads.read(files, layout, info)
    heads, warnings = _identified(heads, info, source, options.target)
    if provenance is not None:
        entries = heads.medusa.get("provenance")
        entries = [*(entries if isinstance(entries, list) else []), dict(provenance)]
        heads = replace(heads, medusa=heads.medusa | {"provenance": entries})
    made = FORMATS[options.to](heads, weights)
    if base is not None:
        warnings += write_base(files, base)
    elif info.includes_base:
        warnings += (
            "These heads were trained together with the model in the same checkpoint, which "
            "differs from the one it was made from: serve them with that one. --base FOLDER writes "
            "it alone.",
        )
    with new_folder(output, overwrite=options.overwrite) as part:
        size = write_output(part, made)
        if folder is not None:
            copy_calibration(folder, files, part)
    return Conversion(info, output / made.file, size, made.notes, warnings)


def _convert_drafter(
    options: ConvertOptions, files: CheckpointFiles, provenance: Mapping[str, Any] | None
) -> Conversion:
    """Write an EAGLE-3 drafter in another layout."""
    if options.base is not None:
        raise HeadsError(f"{options.source} holds a drafter only: there is no base to write")
    target = None if options.target is None else find_target(options.target).config
    drafter = Drafter.read(files, target)
    medusa = dict(drafter.config.get("medusa") or {"format_version": FORMAT_VERSION})
    if provenance is not None:
        entries = medusa.get("provenance")
        medusa["provenance"] = [*(entries if isinstance(entries, list) else []), dict(provenance)]
    drafter = replace(drafter, config=drafter.config | {"medusa": medusa})
    made = DRAFTER_FORMATS[options.to](drafter)
    with new_folder(options.output, overwrite=options.overwrite) as part:
        size = write_output(part, made)
    return Conversion(None, options.output / made.file, size, made.notes, ())


def _identified(
    heads: Heads, info: HeadsInfo, source: str | Path, target: str | Path | None
) -> tuple[Heads, tuple[str, ...]]:
    """Heads that carry their target's fingerprint where it is known; warnings."""
    if info.includes_base and "target" not in heads.medusa:
        known: str | Path | None = source if _folder_of(source) == Path(source) else None
    else:
        known = target
    if known is None:
        return heads, ()
    match = match_target(info, known, heads=source)
    if match.stored:
        return heads, (match.warning,) if match.warning else ()
    medusa = heads.medusa | {"target": target_fingerprint(known)}
    return replace(heads, medusa=medusa), ()


def _check_target(
    files: CheckpointFiles, layout: Layout, info: HeadsInfo, weights: TargetWeights
) -> None:
    if weights.hidden_size != info.hidden_size:
        raise HeadsError(
            f"{files.label} was made for hidden size {info.hidden_size}; {weights.label} has "
            f"{weights.hidden_size}. Give the target of these heads"
        )
    vocab = weights.vocab_size
    if vocab is None:
        return
    check_vocab(files, layout, info, vocab)
    if info.vocab_size not in (None, vocab):
        raise HeadsError(
            f"{files.label} was made for {info.vocab_size} tokens; the target has {vocab}: "
            f"{weights.label} is another model. Give the target of these heads"
        )
    if layout.token_map:
        read_token_map(files, layout, vocab)


def _folder_of(source: str | Path) -> Path | None:
    path = Path(source).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else None
