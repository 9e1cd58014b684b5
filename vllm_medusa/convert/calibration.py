"""A calibration goes along with the heads it is of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_medusa.heads.digest import digest_heads
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint

OBSERVATIONS = "calibration.safetensors"  # lies beside heads that were calibrated


def copy_calibration(source: Path, files: CheckpointFiles, folder: Path) -> None:
    """Copy ``source``'s calibration, if it has one, beside the heads converted to ``folder``.

    It names the files of the heads that it is of. Where those are ``files``, which were converted,
    it is true of the heads in ``folder`` and names their files; else it stays as it is, and
    readers will notice.
    """
    old, new = source / OBSERVATIONS, folder / OBSERVATIONS
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
    if known is None or known != digest_heads(files):
        return
    made_of["heads"] = digest_heads(find_checkpoint(folder))
    mode = new.stat().st_mode  # safetensors would keep the file to its owner
    save_file(tensors, new, metadata | {"source": json.dumps(made_of)})
    new.chmod(mode)
