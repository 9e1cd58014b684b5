"""Options of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vllm_medusa.options import Model, Options, Source, option


class ConvertOptions(Options):
    """Options of `vllm_medusa.convert.job.convert` and of `vllm-medusa convert`."""

    source: Source = option("the heads: a folder, a file or a hub name", positional=True)
    to: Literal[
        "native",
        "vllm",
        "v1",
        "v2",
        "tgi",
        "tensorrt-llm",
        "safeailab",
        "specforge",
        "speculators",
    ] = option("the format to write; for EAGLE-3 drafters the last three, or native")
    output: Path = option("the folder to write", "-o")
    target: Model | None = option(
        "the heads' target, for its LM head, sizes and fingerprint",
        default=None,
    )
    revision: str | None = option("branch, tag or commit of a hub name", default=None)
    overwrite: bool = option("replace an output that only contains heads", default=False)
