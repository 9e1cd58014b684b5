"""What a conversion is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vllm_medusa.options import Options, option, required


class ConvertOptions(Options):
    """Options of `vllm_medusa.convert.job.convert` and of `vllm-medusa convert`."""

    source: str = required("the heads: a folder, a file or a hub name", positional=True)
    to: Literal["native", "vllm", "v1", "v2", "tgi", "tensorrt-llm"] = required(
        "the format to write"
    )
    output: Path = required("the folder to write", "-o")
    target: str | None = option(
        None, "the model of these heads, for a copy of its LM head, its sizes and its fingerprint"
    )
    base: Path | None = option(
        None,
        "of a full Medusa-2 model: also write the model without its heads",
        metavar="FOLDER",
    )
    revision: str | None = option(None, "branch, tag or commit of a hub name")
    overwrite: bool = option(False, "replace an output that holds nothing but heads")
