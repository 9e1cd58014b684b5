"""Heads told from others by their files, so that what was measured of them can't outlive them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vllm_medusa.heads.files import CheckpointFiles

_END_BYTES = 1 << 16


def digest_heads(files: CheckpointFiles) -> str:
    """Digest names, sizes and both ends of the files of the weights; ``config.json`` may change.

    A file of safetensors begins with its header and ends with weights, one of pickles ends with the
    checksums of all its tensors: weights that were trained on are told from what they were.
    """
    ends = "".join(_ends(path) for path in sorted(set(files.files.values())))
    return hashlib.sha256(ends.encode()).hexdigest()


def _ends(path: Path) -> str:
    digest = hashlib.sha256()
    if path.is_file():  # a part of the target's may be absent
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
