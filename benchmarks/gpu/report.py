"""The document as Markdown, and as plots where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Record
from benchmarks.gpu.verdicts import bound_by_arithmetic, fraction, measured


def markdown(document: Record) -> str:
    """Verdicts first, then what went wrong, then the tables."""
    machine, parts = document["machine"], document["parts"]
    lines = ["# One GPU", "", _hardware(machine), "", f"Command: `{document['command']}`", ""]
    lines += _table(
        ("claim", "verdict", ""),
        [(v["claim"], f"**{v['verdict']}**", v["text"]) for v in document["verdicts"]],
    )
    lines += _problems(parts)
    if speed := measured(parts.get("speed", ())):
        lines += _speed(speed)
    if tiles := measured(parts.get("tiles", ())):
        lines += _tiles(tiles)
    if steps := measured(parts.get("step", ())):
        lines += _steps(steps)
    return "\n".join(lines) + "\n"


def _hardware(machine: Record) -> str:
    rates = [
        f"{name} {machine[key] / scale:.{digits}f} {unit}"
        for name, key, scale, digits, unit in (
            ("copy", "copy_bytes_per_s", 1e12, 2, "TB/s"),
            ("read", "read_bytes_per_s", 1e12, 2, "TB/s"),
            ("bf16 matmul", "matmul_flop_per_s", 1e12, 0, "TFLOP/s"),
        )
        if key in machine
    ]
    host = machine.get("host", {})
    return (
        f"{machine.get('gpu', 'no GPU')}, driver {machine.get('driver', 'unknown')}, "
        f"CUDA {machine.get('cuda', '-')}, torch {machine.get('torch', '-')}, "
        f"Triton {machine.get('triton', '-')}; {host.get('cores', '-')} cores of "
        f"{host.get('cpu', '-')}; commit {host.get('commit', 'unknown')}"
        f"{' with changes' if host.get('uncommitted_changes') else ''}, sources "
        f"{host.get('sources', '-')}. Measured here: {', '.join(rates) or 'nothing'}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _problems(parts: dict[str, list[Record]]) -> list[str]:
    rows = []
    for part, records in parts.items():
        for record in records:
            if record["status"] in ("failed", "error"):
                numbers = {k: record[k] for k in ("error", "relative_error") if k in record}
                reason = str(record.get("reason", numbers)).replace("\n", " ").replace("|", "/")
                rows.append((part, record["name"], record["status"], reason[:160]))
    skipped = sum(r["status"] == "skipped" for records in parts.values() for r in records)
    lines = ["## What went wrong", "", *_table(("part", "case", "", "why"), rows)] if rows else []
    return [*lines, f"{skipped} cases were skipped.", ""] if skipped else lines


def _us(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _speed(records: list[Record]) -> list[str]:
    rows = []
    for r in records:
        named = f"{r['layout']} {r['heads']}/{r['kv_heads']}"
        if r["cache"] != "bfloat16":
            named += f", {r['cache']}"
        if r["planned"]:
            named += f", parts for {r['planned']}"
        rows.append(
            (
                named,
                *(str(r[key]) for key in ("batch", "context", "nodes", "splits")),
                _us(r["floor_us"]),
                _us(r["arithmetic_us"]) + (" *" if bound_by_arithmetic(r) else ""),
                _us(r["ours_us"]),
                f"**{_share(fraction(r))}**",
                *(_us(r.get(f"{name}_us")) for name in ("flash", "cudnn", "masked")),
                _us(r["ours_eager_us"]),
            )
        )
    head = [
        *("heads", "batch", "context", "nodes", "parts", "floor us", "arithmetic us", "ours us"),
        *("of the floor", "flash us", "cuDNN us", "masked us", "eager us"),
    ]
    return [
        "## Attention",
        "",
        "In a CUDA graph, keys cold. flash, cuDNN: torch's, contiguous cache, no mask; masked: "
        "torch's memory-efficient kernel with the tree's mask; eager: the host's wait for one "
        "call of ours. *: arithmetic alone exceeds what the target allows.",
        "",
        *_table(head, rows),
    ]


def _tiles(records: list[Record]) -> list[str]:
    def words(variant: Record) -> str:
        names = ("splits", "block_m", "block_n", "num_warps", "num_stages")
        return "/".join(str(variant[name]) for name in names)

    rows = [
        (
            r["name"].removeprefix("sweep "),
            f"{words(r['chosen'])}: {_us(r['chosen']['us'])}",
            f"{words(r['best'])}: {_us(r['best']['us'])}",
            f"{r['chosen_over_best']:.2f}",
            str(sum("us" not in v for v in r["variants"])),
        )
        for r in records
    ]
    head = ("shape", "chosen: us", "best: us", "chosen / best", "did not run")
    return ["## Tiles", "", "parts/block_m/block_n/warps/stages.", "", *_table(head, rows)]


def _steps(records: list[Record]) -> list[str]:
    rows = []
    for r in records:
        for step in r["steps"]:
            keys = ("step", "score", "attention", "verify", "propose", "propose_shared")
            ratio, shared = step.get("ratio"), step.get("ratio_shared")
            rows.append(
                (
                    r["model"],
                    *(str(value) for value in (r["batch"], r["context"], step["nodes"])),
                    *(_us(step.get(f"{key}_us")) for key in keys),
                    "-" if ratio is None else f"**{ratio:.3f}**",
                    "-" if shared is None else f"**{shared:.3f}**",
                    _share(r["plain_floor_us"] / step["step_us"])
                    if ratio is None and r["plain_floor_us"]
                    else "",
                )
            )
    head = [
        *("model", "batch", "context", "nodes", "step us", "score us", "attention us"),
        *("verify us", "propose us", "propose, shared LM head us"),
        *("/ plain", "/ plain, shared", "plain step of its floor"),
    ]
    return ["## A decode step", "", *_table(head, rows)]


def plot(document: Record, path: Path) -> bool:
    """Attention over context and steps over nodes; False without matplotlib or anything to show."""
    speed = measured(document["parts"].get("speed", ()))
    steps = measured(document["parts"].get("step", ()))
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    layouts = list(dict.fromkeys(r["layout"] for r in speed))
    if not layouts and not steps:
        return False
    figure, grid = plt.subplots(
        1,
        len(layouts) + bool(steps),
        figsize=(4.6 * (len(layouts) + bool(steps)), 4.4),
        squeeze=False,
    )
    for axes, layout in zip(grid[0], layouts, strict=False):
        _plot_layout(axes, layout, [r for r in speed if r["layout"] == layout])
    if steps:
        _plot_steps(grid[0][-1], steps)
    figure.suptitle(_hardware(document["machine"]).partition(";")[0], fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _plot_layout(axes: Any, layout: str, records: list[Record]) -> None:
    """Share of the bandwidth floor over the context, a line for each batch; 64 nodes."""
    for color, batch in enumerate(sorted({r["batch"] for r in records})):
        for name, style in (("ours", "-"), ("flash", ":")):
            points = sorted(
                (r["context"], share)
                for r in records
                if r["batch"] == batch and r["nodes"] == 64
                if r["cache"] == "bfloat16" and not r["planned"]
                if (share := fraction(r, name)) is not None
            )
            if points:
                label = f"{name}, batch {batch}"
                axes.plot(*zip(*points, strict=True), style, color=f"C{color}", label=label)
    axes.axhline(0.8, color="0.5", linewidth=1)
    axes.set(xscale="log", xlabel="context", ylim=(0, 1.15), title=f"{layout}, 64 nodes")
    axes.set_ylabel("bandwidth floor / time")
    if axes.lines[1:]:
        axes.legend(fontsize=6)


def _plot_steps(axes: Any, records: list[Record]) -> None:
    """Step time over the plain step's, by number of nodes."""
    for record in records:
        points = [(s["nodes"], s.get("ratio", 1.0)) for s in record["steps"]]
        label = f"{record['model']}, batch {record['batch']}, {record['context']}"
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    axes.axhline(1.15, color="0.5", linewidth=1)
    axes.set(xlabel="nodes", ylabel="step / plain step", title="decode step, own LM heads")
    axes.legend(fontsize=6)
