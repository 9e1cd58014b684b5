"""What a conversion may replace, and how it writes tensors and what goes along with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.convert.heads import Output
from vllm_medusa.files import new_path, refuse_strangers
from vllm_medusa.heads.checkpoint import config_text
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.heads.files import CheckpointFiles, digest_heads, find_checkpoint
from vllm_medusa.heads.info import open_heads
from vllm_medusa.heads.model import HeadsError

# What a conversion writes, so what it may replace if the weights are heads.
_WEIGHTS = ("model.safetensors", "medusa_lm_head.*", "pytorch_model.bin")
_OBSERVATIONS = "calibration.safetensors"  # lies beside heads that were calibrated
_OURS = ("config.json", _OBSERVATIONS, *_WEIGHTS)


def check_output(
    path: Path, whole: Path | None, *, overwrite: bool, sources: Sequence[str | Path | None]
) -> None:
    """Refuse an output that exists, holds anything but heads, or is what is read, or in it.

    ``whole`` is a source that is a folder: all in it is read.
    """
    place = path.resolve()
    for source in sources:
        if source is not None and path.exists() and Path(source).resolve() == place:
            raise HeadsError(f"{path} is what is being read: give another output")
    if whole is not None and place.is_relative_to(whole.resolve()):
        raise HeadsError(f"{path} lies in {whole}, which is being read: give an output elsewhere")
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise HeadsError(f"{path} exists: give another output, or --overwrite to replace it")
    if not path.is_dir() or path.is_symlink():
        raise HeadsError(f"{path} is no folder: --overwrite replaces folders of checkpoints only")
    refuse_strangers(path, _OURS)
    entries = sorted(path.iterdir())
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
        _, _, info = open_heads(file)
    except HeadsError as error:
        if drafter_method(file.parent) is not None:
            return
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


def copy_calibration(source: Path, files: CheckpointFiles, folder: Path) -> None:
    """Copy ``source``'s calibration, if it has one, beside the heads converted to ``folder``.

    It names the files of the heads that it is of. Where those are ``files``, which were converted,
    it is true of the heads in ``folder`` and names their files; else it stays as it is, and
    readers will notice.
    """
    old, new = source / _OBSERVATIONS, folder / _OBSERVATIONS
    if not old.is_file():
        return
    shutil.copyfile(old, new)
    try:
        with safe_open(old, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        made_of = json.loads(metadata["source"])
        known = made_of.get("heads")
    except (SafetensorError, KeyError, ValueError, AttributeError):
        return  # who reads it says what is wrong
    if known is not None and known == digest_heads(files):
        made_of["heads"] = digest_heads(find_checkpoint(folder))
        save_tensors(tensors, new, metadata | {"source": json.dumps(made_of)})


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any new file, not its writer's own."""
    with new_path(path) as part:
        try:
            save_file(tensors, part, dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise OSError(f"{path} can't be written ({error}). Free some space there.") from None


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
