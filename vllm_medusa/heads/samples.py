"""Runs of neighbouring values of tensors on disk, read without what lies around them.

A memory map would do the same with less code, but a page it touches brings the disk's whole
read-ahead with it (often megabytes), and a large target has thousands of runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_medusa.heads.files import DTYPES, CheckpointFiles, TensorSpec, load_pickle
from vllm_medusa.heads.model import HeadsError

Run = Callable[[Sequence[int], int], Tensor]  # where it begins, one index a dimension; its length

_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it


def open_runs(
    files: CheckpointFiles, names: Iterable[str]
) -> Iterator[tuple[str, TensorSpec, Run]]:
    """Headers of tensors and what reads their runs, file by file; valid until the next one.

    A run goes along the last dimension and ends there if it is shorter. Values of a dtype that
    torch has no word for come as bytes.

    Raises:
        HeadsError: A damaged file, or one without a tensor that its index puts there.

    """
    for path, wanted in files.by_file(names).items():
        opened = _safetensors if path.suffix == ".safetensors" else _pickle
        yield from opened(path, wanted)


def _safetensors(path: Path, names: list[str]) -> Iterator[tuple[str, TensorSpec, Run]]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > _LONGEST_HEADER:
            raise HeadsError(f"{path} is not a safetensors file: a header of {length} bytes")
        try:
            header = json.loads(os.pread(descriptor, length, 8))
            entries = {name: _entry(header[name]) for name in names}
        except (ValueError, KeyError, TypeError) as error:
            raise HeadsError(f"{path} lacks tensors or is no safetensors file: {error!r}") from (
                error
            )
        for name, (spec, begin, size) in entries.items():
            yield name, spec, _reader(path, descriptor, spec, 8 + length + begin, size)
    finally:
        os.close(descriptor)


def _entry(entry: dict[str, object]) -> tuple[TensorSpec, int, int]:
    """A tensor's spec, where it begins behind the header, and bytes for each of its values."""
    dtype, shape, offsets = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(entry)
    begin, end = map(int, offsets)
    spec = TensorSpec(tuple(map(int, shape)), DTYPES.get(dtype, dtype))
    return spec, begin, (end - begin) // max(1, spec.num_values)


def _reader(path: Path, descriptor: int, spec: TensorSpec, begin: int, size: int) -> Run:
    def read(places: Sequence[int], length: int) -> Tensor:
        position = 0
        for place, extent in zip(places, spec.shape, strict=True):
            position = position * extent + place
        wanted = size * min(length, spec.shape[-1] - places[-1])
        raw = os.pread(descriptor, wanted, begin + size * position)
        if len(raw) != wanted:
            raise HeadsError(f"{path} ends before its tensors do: it is not whole")
        known = spec.dtype if isinstance(spec.dtype, torch.dtype) else torch.uint8
        return torch.frombuffer(bytearray(raw), dtype=known)

    return read


def _pickle(path: Path, names: list[str]) -> Iterator[tuple[str, TensorSpec, Run]]:
    state = load_pickle(path)

    def reader(tensor: Tensor) -> Run:
        return lambda places, length: tensor[tuple(places[:-1])][places[-1] :][:length]

    for name in names:
        if name not in state:
            raise HeadsError(f"{path} lacks {name!r}, which the checkpoint's index puts there")
        tensor = state[name]
        yield name, TensorSpec(tuple(tensor.shape), tensor.dtype), reader(tensor)
