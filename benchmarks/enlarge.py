"""Makes a small target and its drafters large, equal outputs: what the other cases measure on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, Row
from benchmarks.enlarge_heads import enlarge_drafter, enlarge_heads
from benchmarks.enlarge_target import BIG, Shape, enlarge_target
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.job import Progress
from vllm_medusa.options import Options, Positive, option


class EnlargeOptions(Options):
    """The small model, where the large one goes, and its shape."""

    target: Path = option("folder of the small model", positional=True)
    output: Path = option("folder for target/ and the drafters", positional=True)
    heads: tuple[Path, ...] = option(
        "folders of its Medusa or Hydra heads and EAGLE-3 drafters; each keeps its name",
        default=(),
    )
    hidden_size: Positive = option(default=BIG.hidden_size)
    intermediate_size: Positive = option(default=BIG.intermediate_size)
    num_layers: Positive = option(default=BIG.num_layers)
    num_heads: Positive = option(default=BIG.num_heads)
    num_kv_heads: Positive = option(default=BIG.num_kv_heads)


def run(options: EnlargeOptions, progress: Progress) -> Iterator[Row]:
    """A row for the target and one for each of its drafters."""
    big = Shape(**{name: getattr(options, name) for name in Shape.__dataclass_fields__})
    names = [folder.name for folder in options.heads]
    if len({"target", *names}) <= len(names):
        raise ValueError(f'--heads: folders of {names}; name each differently, none "target"')
    count = enlarge_target(options.target, options.output / "target", big)
    yield Row({"name": "target"}, {"millions": count / 1e6}, right=True)
    for folder, name in zip(options.heads, names, strict=True):
        destination = options.output / name
        if drafter_method(folder) == "eagle3":
            count = enlarge_drafter(folder, destination, big)
        else:
            count = enlarge_heads(folder, options.target, destination, big.hidden_size)
        yield Row({"name": name}, {"millions": count / 1e6}, right=True)


CASE = Case(EnlargeOptions, run, {"name": ("made", ""), "millions": ("million parameters", ".0f")})
