"""Does `tiles` choose well? The same attention with other tiles and in other numbers of parts.

One thing is changed at a time from what `tiles` chose: the parts, then each size of the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.kernel_speed import LAYOUTS, RELATIVE, describe, floors, timed
from benchmarks.gpu.layouts import Setup, Spec, check, copies_of, setup, to_compile
from vllm_medusa.scorer.tiles import Tiles

PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHAPES = (  # layout, batch, context, nodes
    ("Llama-2-7B", 1, 4096, 64),
    ("Llama-3-8B", 1, 4096, 64),
    ("Llama-3-70B, 1 of 8 GPUs", 1, 16384, 64),
    ("Llama-3-8B", 1, 4096, 16),
    ("Llama-2-7B", 16, 4096, 64),
    ("Llama-3-70B", 4, 8192, 64),
    ("Llama-3-8B", 1, 32768, 64),
    ("Llama-3-8B", 1, 4096, 1),
)


def cases(small: bool) -> list[Case]:
    """One case for each shape."""
    specs = [Spec(n, *LAYOUTS[n], b, c, nodes) for n, b, c, nodes in SHAPES]
    if small:
        specs = [Spec("tiny", 4, 2, 1, 40, 5, head_size=16)]
    return [_case(spec, small) for spec in specs]


def _case(spec: Spec, small: bool) -> Case:
    def launch() -> None:
        made = to_compile(spec)
        chosen = _chosen(made)
        made.attend()
        for tiles in other_tiles(chosen["tiles"], small):
            with tiles_as(tiles):
                made.attend()
        replace(made, batch=replace(made.batch, num_splits=1)).attend()

    return Case(f"sweep {spec.name}", partial(sweep, spec, small), launch)


def _chosen(made: Setup) -> dict[str, Any]:
    from vllm_medusa.scorer import launch

    kept, seen = launch.tile_sizes, []

    def note(*arguments: Any) -> Tiles:
        seen.append(kept(*arguments))
        return seen[-1]

    launch.tile_sizes = note  # type: ignore[assignment]
    try:
        made.attend()
    finally:
        launch.tile_sizes = kept
    return {"splits": made.batch.num_splits, "tiles": seen[-1]}


def _other_parts(chosen: dict[str, Any], small: bool) -> list[int]:
    return sorted({chosen["splits"], *((1, 3) if small else PARTS)})


def other_tiles(tiles: Tiles, small: bool = False) -> list[Tiles]:
    """The chosen tiles, then their neighbours."""
    changed = [
        replace(tiles, block_n=32),
        replace(tiles, num_warps=12 - tiles.num_warps),  # 4 or 8
        replace(tiles, num_stages=2),
        replace(tiles, num_stages=4),
        replace(tiles, block_m=max(16, tiles.block_m // 2)),
        replace(tiles, block_m=max(16, tiles.block_m // 2), num_warps=4, num_stages=4),
    ]
    return list(dict.fromkeys([tiles, *(changed[:1] if small else changed)]))


@contextmanager
def tiles_as(tiles: Tiles) -> Iterator[None]:
    """Launch with these tiles, whatever the shape."""
    from vllm_medusa.scorer import launch

    kept = launch.tile_sizes
    launch.tile_sizes = lambda *_: tiles  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.tile_sizes = kept


def sweep(spec: Spec, small: bool, lab: Lab) -> Record:
    """Times of all variants; a variant that doesn't fit the GPU has a reason in place of one."""
    chosen = _chosen(setup(spec, lab.storage, 1))
    floor, _ = floors(spec, lab)
    variants = [
        {"splits": splits, **vars(chosen["tiles"])} for splits in _other_parts(chosen, small)
    ]
    others = other_tiles(chosen["tiles"], small)[1:]
    variants += [{"splits": chosen["splits"], **vars(tiles)} for tiles in others]
    found = [variant | _time(spec, variant, lab) for variant in variants]
    timed_ones = [variant for variant in found if "us" in variant]
    own = {"splits": chosen["splits"], **vars(chosen["tiles"])}
    ours = next(v["us"] for v in timed_ones if own.items() <= v.items())
    best = min(timed_ones, key=lambda variant: variant["us"])
    return {
        "passed": all(variant["relative_error"] < 2 * RELATIVE for variant in timed_ones),
        **describe(spec),
        "floor_us": floor,
        "chosen": own | {"us": ours},
        "best": best,
        "chosen_over_best": ours / best["us"],
        "variants": found,
    }


def _time(spec: Spec, variant: dict[str, Any], lab: Lab) -> Record:
    splits = variant["splits"]
    tiles = Tiles(**{name: variant[name] for name in Tiles.__dataclass_fields__})
    copies = copies_of(spec, lab.storage, int(lab.machine.get("l2_bytes", 1 << 16)))
    try:
        with tiles_as(tiles):
            made = setup(spec, lab.storage, copies, splits)
            error = check(made)
            calls = 1 if lab.device != "cuda" else max(copies, 8)
            times = timed("ours", made.attend, copies, calls, lab)
    except Exception as reason:  # such as more shared memory than there is
        if lab.device == "cuda":
            torch.cuda.synchronize()  # raises if the device is lost, which ends the case
        return {"reason": f"{type(reason).__name__}: {reason}"[:200]}
    return {"us": times["ours_us"], "relative_error": error}
