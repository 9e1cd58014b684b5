"""The base of a full Medusa-2 checkpoint as a model of its own: everything but the heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vllm_medusa.convert.folder import apart, save_tensors
from vllm_medusa.files import new_folder
from vllm_medusa.heads.checkpoint import config_text
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.formats import is_head_tensor
from vllm_medusa.heads.model import HeadsError

_WEIGHTS = (".bin", ".safetensors", ".pt", ".index.json")


def write_base(files: CheckpointFiles, output: Path) -> tuple[str, ...]:
    """Write the base as safetensors, one file for each that held some of it; returns warnings.

    Tensors keep their names, values and dtypes; config.json loses what is Medusa's, and every file
    beside the weights (tokenizer, generation settings) is copied as it is.

    Raises:
        HeadsError: A file of the weights is not on this machine.

    """
    shards: dict[Path, list[str]] = {}
    for name, path in files.files.items():
        if not is_head_tensor(name):
            shards.setdefault(path, []).append(name)
    for path in shards:
        if not path.is_file():
            raise HeadsError(
                f"{path} is not here, which holds a part of the base: download the whole "
                "checkpoint and give its folder"
            )
    config = {
        key: value for key, value in files.config.items() if not key.lower().startswith("medusa")
    }
    with new_folder(output) as part:
        weight_map: dict[str, str] = {}
        total = 0
        for number, (path, names) in enumerate(sorted(shards.items()), 1):
            target = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            target = target if len(shards) > 1 else "model.safetensors"
            tensors = apart(
                dict(CheckpointFiles("", {}, dict.fromkeys(names, path)).tensors(names))
            )
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            save_tensors(tensors, part / target)
            weight_map |= dict.fromkeys(names, target)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2)
            (part / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        for entry in sorted(next(iter(shards)).parent.iterdir()):
            left_out = entry.name == "config.json" or entry.name.endswith(_WEIGHTS)
            if entry.is_file() and not left_out:
                shutil.copyfile(entry, part / entry.name)
        (part / "config.json").write_text(config_text(config, output), encoding="utf-8")
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if odd := [name for name in named if "medusa" in str(name).lower()]:
        return (
            f"The base's config.json names the architecture {odd[0]}: correct it to the plain "
            "model's before you load it.",
        )
    return ()
