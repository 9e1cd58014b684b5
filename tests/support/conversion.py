"""Conversion helpers of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_medusa.convert import job
from vllm_medusa.convert.options import ConvertOptions


def convert(
    source: str | Path, to: str, output: Path, *, provenance: Any = None, **options: Any
) -> job.Conversion:
    """`vllm_medusa.convert.job.convert` with its options as keyword arguments."""
    given = ConvertOptions(source=str(source), to=to, output=output, **options)
    return job.convert(given, provenance=provenance)
