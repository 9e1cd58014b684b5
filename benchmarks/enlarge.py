"""Makes a small target and its heads large, with equal outputs: what the other cases measure on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, Row
from benchmarks.enlarge_heads import enlarge_heads
from benchmarks.enlarge_target import BIG, Shape, enlarge_target
from vllm_medusa.job import Progress
from vllm_medusa.options import Options, Positive, option


class EnlargeOptions(Options):
    """The small model, where the large one goes, and its shape."""

    target: Path = option("folder of the small model", positional=True)
    output: Path = option("folder for target/ and heads/", positional=True)
    heads: Path | None = option("folder of its Medusa heads", default=None)
    hidden_size: Positive = option(default=BIG.hidden_size)
    intermediate_size: Positive = option(default=BIG.intermediate_size)
    num_layers: Positive = option(default=BIG.num_layers)
    num_heads: Positive = option(default=BIG.num_heads)
    num_kv_heads: Positive = option(default=BIG.num_kv_heads)


def run(options: EnlargeOptions, progress: Progress) -> Iterator[Row]:
    """A row for the target and, when given, its heads."""
    big = Shape(**{name: getattr(options, name) for name in Shape.__dataclass_fields__})
    count = enlarge_target(options.target, options.output / "target", big)
    yield Row({"name": "target"}, {"millions": count / 1e6}, right=True)
    if options.heads is not None:
        destination = options.output / "heads"
        count = enlarge_heads(options.heads, options.target, destination, big.hidden_size)
        yield Row({"name": "heads"}, {"millions": count / 1e6}, right=True)


CASE = Case(EnlargeOptions, run, {"name": ("made", ""), "millions": ("million parameters", ".0f")})
