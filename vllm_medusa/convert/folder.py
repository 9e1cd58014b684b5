"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.convert.heads import Output
from vllm_medusa.heads.checkpoint import config_text
from vllm_medusa.heads.files import find_checkpoint
from vllm_medusa.heads.formats import read_layout
from vllm_medusa.heads.info import describe
from vllm_medusa.heads.model import HeadsError

# What a conversion writes, so what it may replace if the weights are heads.
_WEIGHTS = ("model.safetensors", "medusa_lm_head.*")
_OURS = ("config.json", "calibration.safetensors", *_WEIGHTS)


def check_output(path: Path, *, overwrite: bool, sources: Sequence[str | Path | None]) -> None:
    """Refuse an output that exists, holds anything but heads, or is what is read."""
    for source in sources:
        if source is not None and path.exists() and Path(source).resolve() == path.resolve():
            raise HeadsError(f"{path} is what is being read: give another output")
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise HeadsError(f"{path} exists: give another output, or --overwrite to replace it")
    if not path.is_dir() or path.is_symlink():
        raise HeadsError(f"{path} is no folder: --overwrite replaces folders of checkpoints only")
    entries = sorted(path.iterdir())
    strangers = [e.name for e in entries if not (e.is_file() and any(map(e.match, _OURS)))]
    if strangers:
        raise HeadsError(
            f"{path} also holds {', '.join(strangers[:4])}, which --overwrite would delete: give "
            "another output, or move them away"
        )
    weights = [entry for entry in entries if any(map(entry.match, _WEIGHTS))]
    for file in weights:
        _check_heads(file)
    if entries and not weights:
        raise HeadsError(
            f"{path} holds {entries[0].name} but no heads: --overwrite replaces heads only. Give "
            "another output"
        )


def _check_heads(file: Path) -> None:
    """Refuse weights that are not Medusa heads, or not only; reads names and shapes."""
    try:
        files = find_checkpoint(file)
        info = describe(files, read_layout(files.files, files.config, files.label))
    except HeadsError as error:
        raise HeadsError(
            f"{file} holds no Medusa heads that can be read, and --overwrite replaces nothing "
            "else: give another output, or move it away"
        ) from error
    if info.includes_base:
        raise HeadsError(
            f"{file} holds a language model beside its Medusa heads, which --overwrite would "
            "delete: give another output"
        )


def check_apart(output: Path, base: Path) -> None:
    """Refuse two outputs of which one is, or lies in, the other."""
    first, second = output.resolve(), base.resolve()
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise HeadsError(
            f"the base {base} and the output {output} are one folder, or one lies in the other: "
            "give two folders side by side"
        )


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes ``path`` when the block ends well and else vanishes.

    Killed inside the block, ``path`` is what it was; a rest of it lies beside as ``.NAME.part``,
    and the next try takes it away. A folder that is replaced is never half one, half the other.

    Raises:
        HeadsError: Without ``overwrite``, something is at ``path``, even if only since the start;
            no folder can be made there.

    """
    path = path.resolve()  # "." has no name
    part, old = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    except OSError as error:
        raise HeadsError(
            f"{path} can't be made ({error.strerror}): give an output in a folder that can be "
            "written to"
        ) from error
    try:
        yield part
        for entry in [*part.iterdir(), part]:
            _sync(entry)
        if path.exists() and not overwrite:
            raise HeadsError(f"{path} was made meanwhile: give another output")
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    part.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_output(folder: Path, made: Output) -> int:
    """Write a format's tensors and config; returns the bytes of the tensors' file."""
    text = config_text(made.config, folder / "config.json")
    path = folder / made.file
    if path.suffix == ".safetensors":
        save_tensors(apart(made.tensors), path)
    else:
        torch.save(_without_larger_memory(made.tensors), path)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return path.stat().st_size


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of any new file, not its writer's own."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _without_larger_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without what they are views of, which a pickle would store; copies stay shared."""
    own: dict[int, Tensor] = {}
    for tensor in tensors.values():
        used = tensor.numel() * tensor.element_size()
        larger = tensor.untyped_storage().nbytes() != used
        own.setdefault(tensor.data_ptr(), tensor.clone() if larger else tensor.detach())
    return {name: own[tensor.data_ptr()] for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
