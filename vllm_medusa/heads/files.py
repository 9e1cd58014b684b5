"""Location of a checkpoint's tensors, and their shapes and dtypes without loading them.

A source is a folder, a file, or a hub name. Headers (safetensors) or memory maps (``.pt``,
``.bin``) give shapes and dtypes; pickles are only ever opened with ``weights_only=True``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_medusa import files as plain_files
from vllm_medusa.heads.formats import head_names, heads_alone, is_head_tensor
from vllm_medusa.heads.model import HeadsError

# In order of preference: heads alone before whole models, safetensors before pickles.
HEADS_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
DTYPES = {  # names in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# File names (None: all) -> the folder that contains those of them that exist.
Fetch = Callable[[list[str] | None], Path]
Progress = Callable[[int, int], None]  # bytes read, total bytes


@dataclass(frozen=True)
class TensorSpec:
    """One tensor's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str  # str: not a torch dtype

    @property
    def num_values(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the values in bytes; one byte each if torch does not have the dtype."""
        return self.num_values * (self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 1)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint on disk: tensor names and their files."""

    label: str  # its name in errors
    config: dict[str, Any]  # its config.json, {} without one
    files: dict[str, Path]  # tensor name -> file; files without heads may be absent

    def specs(self, names: Iterable[str]) -> dict[str, TensorSpec]:
        """Shapes and dtypes of tensors, without reading weights."""
        return {name: _spec(part) for name, part in self.slices(names)}

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors on the CPU, one at a time, file by file."""
        for name, part in self.slices(names):
            yield name, part if isinstance(part, Tensor) else part[...]

    def finite_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """`tensors`, of which none holds NaN or infinity; else `HeadsError`."""
        for name, tensor in self.tensors(names):
            if not is_finite(tensor):
                raise HeadsError(
                    f"{self.label}: {name!r} holds NaN or infinity: the training diverged. Retrain "
                    "it"
                )
            yield name, tensor

    def find_damage(self, names: Iterable[str], progress: Progress | None = None) -> list[str]:
        """Descriptions of tensors that hold NaN or infinity; reads each once."""
        specs, damage, done = self.specs(names), list[str](), 0
        total = sum(spec.bytes for spec in specs.values())
        for name, tensor in self.tensors(specs):
            if not is_finite(tensor):
                damage.append(f"{name!r} holds NaN or infinity: the training diverged. Retrain it")
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
        return damage

    def slices(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Lazily loaded tensors, each valid until the next one; in any order.

        Each is a tensor, or a slice of ``safe_open(..).get_slice``.

        Raises HeadsError: a damaged file, or one without a tensor listed in its index.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for path, wanted in by_file.items():
            with _open(path) as (present, get):
                if absent := sorted({*wanted} - {*present}):
                    raise HeadsError(
                        f"{path} lacks {absent[0]!r}, which is in the checkpoint's index"
                    )
                yield from ((name, get(name)) for name in wanted)


Source = str | Path | CheckpointFiles  # a folder, a file or a hub name, or what was found there


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity."""
    if not tensor.is_floating_point():
        return True
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch has no isfinite of fp8
    return bool(torch.isfinite(wide).all())


def is_drafter(files: CheckpointFiles) -> bool:
    """Whether a checkpoint holds an EAGLE drafter."""
    bare = {name.rsplit("model.", 1)[-1].replace("midlayer.", "layers.0.") for name in files.files}
    return not bare.isdisjoint({"fc.weight", "layers.0.hidden_norm.weight"})


def digest_heads(files: CheckpointFiles) -> str:
    """A digest that ties a measurement to the measured heads; ``config.json`` may change."""
    return plain_files.digest_ends(sorted(set(files.files.values())))


def find_checkpoint(source: Source, revision: str | None = None) -> CheckpointFiles:
    """Find a checkpoint in a folder, a file, or a model of the hub (downloaded once, then cached).

    One already found is returned as it is.

    Raises HeadsError: there is none, the hub is unreachable and it was not downloaded before, or a
    local one has a revision.
    """
    if isinstance(source, CheckpointFiles):
        assert revision is None
        return source
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise HeadsError(
            f"revision {revision!r} was set for the local {source}; only a hub name has "
            "revisions. Omit it"
        )
    if path.is_file():
        return _from_file(path, lambda names: path.parent, str(source))
    if path.is_dir():
        return _from_folder(lambda names: path, str(source))
    if isinstance(source, str) and _HUB_NAME.fullmatch(source):
        return _from_folder(_hub(source, revision), source)
    raise HeadsError(
        f"heads {str(source)!r}: no such file or folder, and not a hub name (owner/name). Pass the "
        "folder or file of the heads, or their hub name"
    )


def find_target(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Find a target's own weights in a folder or the hub's local cache; downloads nothing.

    Heads in the same folder or files are ignored.

    Raises HeadsError: there are none, or only heads.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or not isinstance(source, str) or not _HUB_NAME.fullmatch(source):
            raise HeadsError(f"target {str(source)!r}: no such folder or hub name (owner/name)")
        try:
            folder = _hub(source, revision, local_files_only=True)(None)
        except (OSError, ValueError) as error:
            raise HeadsError(
                f"target {source!r}: no such folder, and not a hub model that was "
                "downloaded to this machine. Pass its folder, or download it first"
            ) from error
    for candidate in MODEL_FILES:
        if (folder / candidate).is_file():
            found = _from_file(folder / candidate, lambda names: folder, str(source), heads=False)
            files = {n: path for n, path in found.files.items() if not is_head_tensor(n)}
            if (found.files and not files) or heads_alone(files):
                raise HeadsError(
                    f"target {str(source)!r} holds Medusa heads, not a language model. Pass the "
                    "model that the heads were trained for"
                )
            return CheckpointFiles(found.label, found.config, files)
    raise HeadsError(
        f"target {str(source)!r}: none of {', '.join(MODEL_FILES)} exists. Pass the folder of "
        "the model's weights"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; `HeadsError` for anything else."""
    try:
        return plain_files.read_json(path)
    except plain_files.FileRefused as error:
        raise HeadsError(str(error)) from error


def _hub(name: str, revision: str | None, **options: Any) -> Fetch:
    from huggingface_hub import snapshot_download

    def fetch(names: list[str] | None) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=names, **options))

    return fetch


def _from_folder(fetch: Fetch, label: str) -> CheckpointFiles:
    for candidate in (*HEADS_FILES, *MODEL_FILES):
        try:
            folder = fetch(["config.json", candidate])
        except (OSError, ValueError) as error:  # raised by huggingface_hub, offline or not
            reason = " ".join(str(error).split())
            raise HeadsError(
                f"heads {label!r}: not a local folder, and the hub download failed "
                f"({type(error).__name__}: {reason}). Check the name and the connection, or "
                "download the heads or drafter and pass the folder"
            ) from error
        if (folder / candidate).is_file():
            return _from_file(folder / candidate, fetch, label)
    present = sorted(entry.name for entry in folder.iterdir())
    raise HeadsError(
        f"heads {label!r}: none of {', '.join((*HEADS_FILES, *MODEL_FILES))} exists; it "
        f"holds {', '.join(present[:8]) or 'no files'}. Pass the heads' folder or the file itself"
    )


def _from_file(path: Path, fetch: Fetch, label: str, heads: bool = True) -> CheckpointFiles:
    config_path = path.parent / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    if not path.name.endswith(".index.json"):
        with _open(path) as (names, _):
            return CheckpointFiles(label, config, dict.fromkeys(names, path))
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise HeadsError(f"{path} has no 'weight_map': it is not a checkpoint index")
    wanted = head_names(weight_map) if heads else weight_map
    shards = sorted({str(weight_map[name]) for name in wanted})
    try:
        folder = fetch(shards)
    except (OSError, ValueError) as error:
        raise HeadsError(f"heads {label!r}: can't download {shards}: {error}") from error
    for shard in shards:
        if not (folder / shard).is_file():
            raise HeadsError(f"{path} lists {shard!r}, which is missing")
    files = {name: folder / str(shard) for name, shard in weight_map.items()}
    return CheckpointFiles(label, config, files)


@contextmanager
def _open(path: Path) -> Iterator[tuple[Iterable[str], Callable[[str], Any]]]:
    """Names of the tensors in a file, and a function that returns their slices."""
    if path.suffix != ".safetensors":
        state = _load_pickle(path)
        yield state, state.__getitem__
        return
    try:
        with safe_open(path, framework="pt") as file:
            if "packed" in (file.metadata() or {}):
                raise HeadsError(
                    f"{path} holds packed int8 weights. Unpack them in a clone of vllm-medusa: "
                    f".venv/bin/python -m demo.packed {path.parent} OUTPUT --target TARGET"
                )
            yield file.keys(), file.get_slice
    except SafetensorError as error:
        raise HeadsError(
            f"{path} is not a complete safetensors file ({error}). Download or copy it again"
        ) from error


def _spec(part: Any) -> TensorSpec:
    if isinstance(part, Tensor):
        return TensorSpec(tuple(part.shape), part.dtype)
    dtype = part.get_dtype()
    return TensorSpec(tuple(part.get_shape()), DTYPES.get(dtype, dtype))


def _load_pickle(path: Path) -> Mapping[str, Tensor]:
    """A state dict, memory-mapped if the file is of torch 1.6 or later; else `HeadsError`."""
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # invalid pickles raise anything; torch suggests running their code
        raise HeadsError(
            f"{path} is not a file of plain tensors written by torch ({type(error).__name__}). "
            "Other pickles are unsafe: they may run code. Convert them to safetensors at their "
            "source; for any other file, pass the heads' folder instead"
        ) from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise HeadsError(f"{path} must hold a state dict (names to tensors), nothing else")
    return state
