"""Tokens per step of several drafters of one target, by the number of draft nodes.

    python -m benchmarks drafters TARGET HEADS --others MORE_HEADS EAGLE_DRAFTER \
        --nodes 2 4 7 15 31 63 --chain 2 4 7 --lookup --stock --texts PROMPTS.jsonl

Of heads and EAGLE drafters (folders) alike: dynamic trees, chains, and with --lookup dynamic trees
that copy from the text too. Heads that were calibrated have static trees as well, grown on their
observations, as `vllm-medusa tree` does; an EAGLE drafter's tree is never static. --stock adds
vLLM's own EAGLE-3 chain and n-grams, greedy only: on CPUs vLLM 0.32 is wrong when it samples with
them. Tokens have to be plain vLLM's. Counts depend on nothing but the texts: no quiet machine is
needed. What stands behind +- is the standard error from prompt to prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.arms import PLAIN, Arm, ArmOptions, ngram_arm
from benchmarks.case import ROOT, Case, Row
from benchmarks.report import table
from benchmarks.tau import answers, differing, figures
from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.search import walked_tree
from vllm_medusa.heads import peek_heads
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.job import Progress
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import Dtype, Positive, option

DYNAMIC, STATIC, CHAIN, COPYING = "dynamic", "static", "chain", "dynamic, lookup"
STYLES = {DYNAMIC: "-", STATIC: "--", CHAIN: ":", COPYING: "-."}


class DraftersOptions(ArmOptions):
    """What is measured."""

    texts: tuple[Path, ...] = option(
        "files of prompts",
        default=(ROOT / "tests" / "assets" / "prompts.jsonl",),
        shown="tests/assets/prompts.jsonl",
    )
    others: tuple[Path, ...] = option("more heads or drafters", default=(), metavar="HEADS")
    nodes: tuple[Positive, ...] = option("draft nodes of trees", default=(15,))
    chain: tuple[Positive, ...] = option("draft tokens of chains", default=(4,))
    lookup: bool = option("lookup too: with each, and alone", default=False)
    stock: bool = option("vLLM's own EAGLE-3 chain and n-grams too, greedy", default=False)
    prompts: Positive = option("of each file", default=16)
    max_tokens: Positive = option("of each answer", default=96)
    batch: tuple[Positive, ...] = option("requests at a time; changes nothing", default=(8,))
    dtype: Dtype = option(default="float32")


@dataclass(frozen=True)
class Entry:
    """An arm, and what the table says of it."""

    drafter: str
    form: str
    arm: Arm

    def named(self) -> dict[str, Any]:
        """The first values of its rows."""
        return {"drafter": self.drafter, "form": self.form, "nodes": self.arm.num_draft_tokens}


def entries(options: DraftersOptions) -> Iterator[Entry]:
    """Everything that is compared, one size after the other."""
    folders = (options.heads, *options.others)
    static = {folder: static_tree(folder, max(options.nodes)) for folder in folders}
    for nodes in options.nodes:
        for folder in folders:
            tree = medusa_config(str(folder.absolute()), budget=str(nodes))
            yield _entry(folder.name, DYNAMIC, nodes, tree)
            if nodes <= len(static[folder]):
                config = {"method": tree["method"], "model": tree["model"]}
                yield _entry(folder.name, STATIC, nodes, config | {"tree": static[folder][:nodes]})
            if options.lookup:
                yield _entry(folder.name, COPYING, nodes, tree | {"lookup": True})
        if options.lookup:
            alone = {"method": "medusa", "lookup": True, "budget": nodes}
            yield _entry("nothing", COPYING, nodes, alone)
    for length in options.chain:
        for folder in folders:
            yield from _chains(folder, length, options)
        if options.stock:
            yield Entry("n-gram", "vLLM's", ngram_arm(length))


def static_tree(folder: Path, nodes: int) -> list[list[int]]:
    """The static tree that calibrated heads' own texts suggest, best nodes first; else none."""
    if drafter_method(folder) is not None:
        return []
    try:
        seen = Observations.load(folder)
    except CalibrationError:
        return []
    return [list(path) for path in walked_tree(seen.texts(), nodes, seen.num_ranks)]


def _chains(folder: Path, length: int, options: DraftersOptions) -> Iterator[Entry]:
    where = str(folder.absolute())
    method = drafter_method(folder)
    config: dict[str, Any] = {"method": method or "medusa", "model": where}
    if method is None:
        if length <= peek_heads(folder).num_heads:
            config["tree"] = {"chain": length}
            yield _entry(folder.name, CHAIN, length, config)
        return
    config["num_speculative_tokens"] = length
    yield _entry(folder.name, CHAIN, length, config | {"tree": "chain"})
    if options.stock:
        arm = Arm(f"{folder.name}, vLLM's chain {length}", "stock", length, config)
        yield Entry(folder.name, "vLLM's chain", arm)


def _entry(drafter: str, form: str, nodes: int, config: dict[str, Any]) -> Entry:
    return Entry(drafter, form, Arm(f"{drafter}, {form} {nodes}", "ours", nodes, config))


def run(options: DraftersOptions, progress: Progress) -> Iterator[Row]:
    """A row for each drafter, form, size, temperature and file of prompts."""
    texts = {path.stem: replace(options, prompt_file=path).read_prompts() for path in options.texts}
    wanted = answers(PLAIN, options, texts)
    for entry in entries(options):
        progress.note(entry.arm.name)
        greedy = tuple(each for each in options.temperatures if each == 0)
        own = replace(options, temperatures=greedy) if entry.arm.kind == "stock" else options
        if not own.temperatures:
            continue
        try:
            found = answers(entry.arm, own, texts)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            yield Row({"name": entry.arm.name, **entry.named()}, failed=reason)
            continue
        for (temperature, name), results in found.items():
            what: dict[str, Any] = {"name": f"{entry.arm.name}, T {temperature:g}, {name}"}
            what |= entry.named() | {"temperature": temperature, "texts": name}
            counts = [(r.acceptance.accepted, r.acceptance.steps) for r in results]
            wrong = differing(results, wanted[temperature, name])
            reason = f"{wrong} of {len(results)} answers differ from plain vLLM's" if wrong else ""
            yield Row(what, figures(counts), right=not wrong, failed=reason)


def together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each temperature, drafter and form: tau over all texts, by the number of nodes."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if "tau" in row:
            key = row["temperature"], row["drafter"], row["form"]
            sums = found.setdefault(key, {}).setdefault(str(row["nodes"]), [0.0, 0.0])
            sums[0] += row["tau"] * row["steps"]
            sums[1] += row["steps"]
    return [
        dict(zip(("temperature", "drafter", "form"), key, strict=True))
        | {nodes: tokens / steps for nodes, (tokens, steps) in sizes.items()}
        for key, sizes in sorted(found.items())
    ]


def text(rows: list[dict[str, Any]]) -> str:
    """All texts together, as a table."""
    sizes = sorted({row["nodes"] for row in rows if "tau" in row})
    columns = {"temperature": ("T", "g"), "drafter": ("drafts of", ""), "form": ("as", "")}
    columns |= {str(size): (str(size), ".2f") for size in sizes}
    title = "Tokens a step by the number of draft nodes, all texts together:"
    return "\n".join([title, "", *table(together(rows), columns)])


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Tau by the number of nodes, all texts together, a panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = together(rows)
    panels_of = sorted({row["temperature"] for row in shown})
    drafters = list(dict.fromkeys(row["drafter"] for row in rows if "tau" in row))
    figure, panels = plt.subplots(
        1, len(panels_of), figsize=(6 * len(panels_of), 5), squeeze=False, sharex=True
    )
    for temperature, panel in zip(panels_of, panels[0], strict=True):
        sizes: set[int] = set()
        for row in (row for row in shown if row["temperature"] == temperature):
            taus = {int(key): value for key, value in row.items() if key.isdecimal()}
            sizes |= taus.keys()
            panel.plot(
                sorted(taus),
                [taus[nodes] for nodes in sorted(taus)],
                STYLES.get(row["form"], "-"),
                color=f"C{drafters.index(row['drafter'])}",
                marker="o" if row["form"] in STYLES else "x",
                ms=3,
                label=f"{row['drafter']}, {row['form']}",
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
        panel.set(title=f"T {temperature:g}", xlabel="draft nodes", ylabel="tokens per step")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


CASE = Case(
    DraftersOptions,
    run,
    {
        "texts": ("texts", ""),
        "temperature": ("T", "g"),
        "drafter": ("drafts of", ""),
        "form": ("as", ""),
        "nodes": ("draft nodes", "d"),
        "tau": ("tau", ".2f"),
        "tau_error": ("+-", ".2f"),
        "steps": ("steps", "d"),
        "requests": ("answers equal to plain's", "d"),
    },
    quick={"prompts": 4, "max_tokens": 32},
    picture=picture,
    text=text,
)
