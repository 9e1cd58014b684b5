"""Heads told from others by their files, so that what was measured of them can't outlive them."""

from __future__ import annotations

import hashlib

from vllm_medusa.files import ends_of
from vllm_medusa.heads.files import CheckpointFiles


def digest_heads(files: CheckpointFiles) -> str:
    """Digest names, sizes and both ends of the files of the weights; ``config.json`` may change."""
    paths = sorted(set(files.files.values()))  # a part of the target's may be absent
    ends = [ends_of(path) if path.is_file() else b"" for path in paths]
    return hashlib.sha256(
        "".join(hashlib.sha256(end).hexdigest() for end in ends).encode()
    ).hexdigest()
