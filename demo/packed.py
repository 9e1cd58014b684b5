"""Pack a drafter's folder to half its size: int8 weights with one scale per output row.

    python -m demo.packed FOLDER OUTPUT --target TARGET     # packs a drafter, or unpacks it

One-dimensional tensors are unchanged, except that ids become int32. LM head rows copied from the
target are omitted and restored from the target. Rounding the drafter does not change which tokens
are generated, only how many drafts are accepted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from demo.smollm2 import MADE
from vllm_medusa.files import FileRefused, new_folder
from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.eagle_checkpoint import drafter_method

FILE = "model.safetensors"
FORMAT = "int8 rows 1"
LM_HEAD, MAP = "lm_head.weight", "d2t"  # of an EAGLE-3 drafter; target id minus draft id
_SCALE = ".scale"  # suffix of a matrix's scale


def int8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., O, I] to the nearest int8, with one fp32 scale per row: [..., O, 1]."""
    scale = matrix.float().abs().amax(-1, keepdim=True) / 127
    return (matrix.float() / scale.clamp_min(1e-30)).round().to(torch.int8), scale


def pack(folder: Path, output: Path, target: Path | None = None) -> None:
    """Write the packed form of a drafter's folder; its ``config.json`` is copied.

    With the ``target``'s folder, an LM head copied from it is omitted.
    """
    if target is not None and not (target / FILE).is_file():
        raise FileRefused(f"--target {target}: no {FILE} in it; pass the model's folder.")
    tensors, _ = _read(folder)
    rows = ""
    if target is not None and {LM_HEAD, MAP} <= tensors.keys():
        own = _target_rows(target, tensors[MAP]).to(tensors[LM_HEAD].dtype)
        if torch.equal(own, tensors[LM_HEAD]):
            rows = str(tensors.pop(LM_HEAD).dtype).removeprefix("torch.")
    packed, dtypes = dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        if not tensor.is_floating_point():
            packed[name] = tensor.int() if tensor.dtype == torch.int64 else tensor
        elif tensor.dim() == 1:
            packed[name] = tensor
        else:
            packed[name], packed[name + _SCALE] = int8_rows(tensor)
    metadata = {"packed": FORMAT, "dtypes": json.dumps(dtypes), "digest": _digest(packed)}
    metadata["target rows"] = rows  # their dtype, if the LM head is omitted
    with new_folder(output) as part:
        save_file(packed, part / FILE, metadata)
        shutil.copyfile(folder / "config.json", part / "config.json")


def unpack(folder: Path, output: Path, target: Path | None) -> None:
    """Write the drafter that was passed to `pack`, with its matrices rounded; replaces ``output``.

    ``target`` is the folder of its target model. Raises FileRefused: the file is damaged or was not
    packed, or its target is required.
    """
    packed, metadata = _read(folder)
    if metadata.get("packed") != FORMAT:
        raise FileRefused(f"{folder / FILE} was not written by `python -m demo.packed`.")
    if metadata.get("digest") != _digest(packed):
        raise FileRefused(f"{folder / FILE} is damaged: its digest differs. Download it again.")
    tensors = {}
    for name, dtype in json.loads(metadata["dtypes"]).items():
        tensor = packed[name]
        if name + _SCALE in packed:
            tensor = tensor.float() * packed[name + _SCALE]
        tensors[name] = tensor.to(getattr(torch, dtype))
    if dtype := metadata["target rows"]:
        if target is None:
            raise FileRefused(f"{folder} has no LM head of its own; pass its target: --target.")
        tensors[LM_HEAD] = _target_rows(target, tensors[MAP]).to(getattr(torch, dtype))
    with new_folder(output, overwrite=True) as part:
        save_file(tensors, part / FILE, {"format": "pt"})
        shutil.copyfile(folder / "config.json", part / "config.json")


def usable(drafter: Path, target: Path, made: Path = MADE / "drafters") -> Path:
    """The drafter's folder; a packed drafter is unpacked into ``made`` first."""
    if not (drafter / FILE).is_file() or "packed" not in _read(drafter)[1]:
        return drafter
    unpack(drafter, made / drafter.name, target)
    return made / drafter.name


def _target_rows(target: Path, offsets: Tensor) -> Tensor:
    """Rows of the target's LM head, or of its embedding if they are tied: [V_draft, H]."""
    with safe_open(target / FILE, "pt") as file:
        names = ("lm_head.weight", "model.embed_tokens.weight")
        whole = file.get_tensor(next(name for name in names if name in file.keys()))  # noqa: SIM118
    return whole[offsets + torch.arange(len(offsets))].contiguous()


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(folder / FILE, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise FileRefused(f"{folder / FILE} is damaged ({error}). Download it again.") from None


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def main() -> int:
    """``python -m demo.packed FOLDER OUTPUT``."""
    parser = argparse.ArgumentParser(prog="python -m demo.packed", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a drafter")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--target", type=Path, help="folder of its target model")
    args = parser.parse_args()
    try:
        if (args.folder / FILE).is_file() and "packed" in _read(args.folder)[1]:
            unpack(args.folder, args.output, args.target)
            return 0
        if drafter_method(args.folder) is None:
            peek_heads(args.folder)  # refuses a folder without heads
        pack(args.folder, args.output, args.target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
