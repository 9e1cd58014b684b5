"""Drafters and forms of trees against plain vLLM: the cases speed, load, tau, tokens, noise, ...

    python -m benchmarks speed --drafter DRAFTER --texts FOLDER_OF_PROMPTS
    python -m benchmarks load --batch 1 4 16 --drafter DRAFTER    # full batches
    python -m benchmarks drafters --drafter HEADS --others HYDRA EAGLE3

These are one benchmark with different defaults (`runner.CASES`). With --rounds 0 nothing is timed:
tokens per step depend only on the texts, so other load on the machine does not matter; values after
+- are standard errors over prompts. With --waves 3 a turn has three answers per batch slot: when an
answer ends, the next request takes its slot, as in a server, and each answer has its own length
(`engines.UnevenAnswer`). The same engine can be some per cent faster or slower after another start:
--starts averages over starts, and the form "plain" is plain vLLM beside itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from benchmarks.case import Case, Plot, Row
from benchmarks.engines import Arm, EngineOptions, UnevenAnswer, compare, explain_notes
from benchmarks.report import table
from demo import packed
from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.walks import walked_tree
from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.eagle_checkpoint import drafter_method
from vllm_medusa.heads.files import find_checkpoint
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Conversation
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import Positive, option

AUTOMATIC = "automatic"
Form = Literal[
    "automatic",
    "automatic+lookup",
    "dynamic",
    "noiseless",
    "static",
    "chain",
    "lookup",
    "both",
    "stock",
    "ngram",
    "plain",
]


class CompareOptions(EngineOptions):
    """Options; ``forms`` apply to every drafter."""

    others: tuple[Path, ...] = option("further heads or drafters", default=(), metavar="FOLDER")
    forms: tuple[Form, ...] = option(
        "automatic: trees by the budget, also with lookup; dynamic, static: trees of --nodes; "
        "noiseless: dynamic without shared noise; chain: of --chain; lookup: dynamic trees "
        "without the drafter; both: with it; stock, ngram: vLLM's own chain and n-grams of "
        "--chain; plain: another engine of plain vLLM, which shows the noise",
        default=("automatic", "chain", "dynamic", "static", "stock", "ngram"),
    )
    nodes: tuple[Positive, ...] = option("numbers of draft nodes of trees", default=(4, 7, 15))
    chain: tuple[Positive, ...] = option("numbers of draft tokens of chains", default=(3, 5))
    waves: Positive = option("answers per batch slot and turn", default=1)
    starts: Positive = option(
        "starts of every engine, each with --rounds; starts differ in speed", default=1
    )


def with_defaults(**defaults: Any) -> type[CompareOptions]:
    """The same options with other defaults."""
    hints = get_type_hints(CompareOptions, include_extras=True)
    known = CompareOptions.__dataclass_fields__
    body = {name: field(default=v, metadata=known[name].metadata) for name, v in defaults.items()}
    annotations = {"__annotations__": {name: hints[name] for name in defaults}}
    return type(
        "CompareOptions", (CompareOptions,), {"__module__": __name__, **annotations, **body}
    )


def run(options: CompareOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, batch, temperature and task."""
    options = options.ready(progress)
    assert options.target is not None
    folders = [options.drafter, *(packed.usable(each, options.target) for each in options.others)]
    session: Any = Conversation
    if options.waves > 1:
        session = partial(UnevenAnswer, mean=options.max_tokens)
    found = arms(folders, options, progress)
    tasks = options.tasks()
    how: dict[str, Any] = {"waves": options.waves, "starts": options.starts, "session": session}
    yield from compare(found, options, progress, tasks, **how)


def arms(folders: list[Path], options: CompareOptions, progress: Progress) -> list[Arm]:
    """The arms to compare with plain vLLM, drafter by drafter."""
    found: list[Arm] = []
    for folder, label in zip(folders, labels(folders), strict=True):
        for form in (form for form in options.forms if form not in ("ngram", "plain")):
            sizes = options.chain if form in ("chain", "stock") else options.nodes
            for size in (0,) if form.startswith(AUTOMATIC) else sizes:
                shares = form in ("dynamic", "noiseless") and not options.rounds
                if arm := arm_of(
                    folder, form, size, budget=max(options.nodes) if shares else size, label=label
                ):
                    if form == "dynamic" and "noiseless" in options.forms:
                        arm = replace(arm, against=f"{arm.what['drafter']}, noiseless {size}")
                    found.append(arm)
                else:
                    progress.note(f"{folder.name}: no {form} of {size}")
    if "plain" in options.forms:
        found.append(Arm("plain", None, {"drafter": "none", "form": "plain"}))
    return list({arm.name: arm for arm in [*found, *_ngrams(options)]}.values())


def labels(folders: list[Path]) -> list[str]:
    """The folders' names, with their parents' if several have the same."""
    names = [folder.name for folder in folders]
    return [
        folder.name if names.count(folder.name) == 1 else "/".join(folder.absolute().parts[-2:])
        for folder in folders
    ]


def _ngrams(options: CompareOptions) -> Iterator[Arm]:
    bounds = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    for size in options.chain if "ngram" in options.forms else ():
        config = {"method": "ngram", "num_speculative_tokens": size, **bounds}
        what = {"drafter": "n-gram", "form": "vLLM's", "nodes": size}
        yield Arm(f"n-gram {size}, vLLM's", config, what, stock=True)


def arm_of(folder: Path, form: str, size: int, *, budget: int = 0, label: str = "") -> Arm | None:
    """One form of a drafter, with ``size`` draft nodes; None if the drafter does not support it.

    With another ``budget``, requests limit a dynamic tree to ``size``: arms can share an engine.
    """
    budget = budget or size
    where, method = str(folder.absolute()), drafter_method(folder)
    config: dict[str, Any] = {"method": method or "medusa", "model": where}
    drafter, against = label or folder.name, ""
    match form:
        case "automatic":
            config = medusa_config(where, {"budget": "auto"})
        case "automatic+lookup":
            config = medusa_config(where, {"budget": "auto", "lookup": True})
        case "dynamic":
            config = medusa_config(where, {"budget": budget})
            against = f"{drafter}, static {size}"
        case "noiseless":
            config = medusa_config(where, {"budget": budget, "shared_noise": False})
        case "both":
            config = medusa_config(where, {"budget": size, "lookup": True})
            against = f"{drafter}, dynamic {size}"
        case "lookup":
            config = {"method": "medusa", "lookup": True, "budget": size}
            drafter, against = "no drafter", f"{drafter}, dynamic {size}"
        case "static":
            config["tree"] = static_paths(folder, size)[:size]
            if len(config["tree"]) < size:
                return None
        case "chain" if method is not None:
            config |= {"tree": "chain", "num_speculative_tokens": size}
        case "chain":
            config["tree"] = {"chain": size}
            if size > peek_heads(folder).num_heads:
                return None
        case "stock":
            config["num_speculative_tokens"] = size
            if method is None and peek_heads(folder).is_hydra:
                return None  # vLLM does not support Hydra heads
    what: dict[str, Any] = {"drafter": drafter, "form": form}
    if form != "lookup":
        what |= training_of(folder)
    name = f"{drafter}, {form}"
    if size:
        what["nodes"], name = size, f"{name} {size}"
    request = {"medusa": {"max_draft_tokens": size}} if budget > size else None
    return Arm(name, config, what, stock=form == "stock", against=against, request=request)


def training_of(folder: Path) -> dict[str, Any]:
    """The kind of a drafter, and the number of generated tokens it was trained on, if known."""
    kind = drafter_method(folder) or ("hydra" if peek_heads(folder).is_hydra else "medusa")
    about = find_checkpoint(folder).config.get("medusa") or {}
    tokens = about.get("training", {}).get("tokens")
    return {"kind": kind} | ({"training_tokens": tokens} if tokens else {})


def static_paths(folder: Path, nodes: int) -> list[list[int]]:
    """The best static tree, from the heads' calibration or else their config; best nodes first."""
    if drafter_method(folder) is not None:
        return []
    try:
        seen = Observations.load(folder)
    except CalibrationError:
        own = peek_heads(folder).tree
        return own if isinstance(own, list) else []
    return [list(path) for path in walked_tree(seen.texts(), nodes, seen.num_ranks)]


def compare_automatic(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load: the automatic budget, and the best of plain vLLM and the other arms."""
    measured, found = [row for row in rows if "ratio_quartiles" in row], []
    for row in measured:
        if row["form"].startswith(AUTOMATIC):
            keys = ("drafter", "temperature", "batch", "texts")
            others = [("plain", 1.0)] + [
                (other["arm"], other["ratio"])
                for other in measured
                if not other["form"].startswith(AUTOMATIC)
                and all(other[key] == row[key] for key in keys)
            ]
            best, ratio = max(others, key=lambda other: other[1])
            own = {key: row[key] for key in ("form", *keys, "ratio", "first")}
            found.append(
                own | {"best": best, "best_ratio": ratio, "relative": row["ratio"] / ratio}
            )
    return found


def text(rows: list[dict[str, Any]]) -> str:
    """The text below the table."""
    parts = [explain_notes(rows)]
    if best := compare_automatic(rows):
        columns = {
            "drafter": ("drafter", ""),
            "form": ("form", ""),
            "texts": ("texts", ""),
            "temperature": ("T", "g"),
            "batch": ("batch", "d"),
            "ratio": ("automatic", ".3f"),
            "first": ("its first round", ".3f"),
            "best": ("best of the others", ""),
            "best_ratio": ("ratio", ".3f"),
            "relative": ("automatic / best", ".3f"),
        }
        parts.append("\n".join(table(best, columns)))
    return "\n\n".join(filter(None, parts))


COLUMNS = {
    "texts": ("texts", ""),
    "temperature": ("T", "g"),
    "batch": ("batch", "d"),
    "drafter": ("drafter", ""),
    "training_tokens": ("trained on tokens", ",d"),
    "form": ("form", ""),
    "nodes": ("draft nodes", "d"),
    "tau": ("tau", ".2f"),
    "tau_error": ("+-", ".2f"),
    "gain": ("gain", "+.1%"),
    "gain_error": ("+-", ".1%"),
    "copied": ("accepted from copies only", ".0%"),
    "ratio": ("ratio to plain", ".2f"),
    "ratio_quartiles": ("quartiles", ".2f"),
    "tokens_per_second": ("tokens/s", ".1f"),
    "step_ms": ("ms per step", ".1f"),
    "plain_step_ms": ("plain vLLM's", ".1f"),
    "rounds": ("rounds", "d"),
    "steps": ("steps", "d"),
    "requests": ("answers compared with plain vLLM", "d"),
    "differing": ("of these, different (not float32)", "d"),
    "gap": ("their largest gap in logits", ".3f"),
}
QUICK = {"prompts": 2, "max_tokens": 32, "rounds": 2}
LOAD_DEFAULTS: dict[str, Any] = {"forms": ("automatic", "dynamic"), "nodes": (2, 4, 7)}
LOAD_DEFAULTS |= {"batch": (1, 2, 4, 8, 16, 32, 64), "waves": 3, "max_tokens": 24}
TAU_DEFAULTS: dict[str, Any] = {"forms": ("static", "dynamic"), "nodes": (2, 4, 7, 15, 31)}
TAU_DEFAULTS |= {"batch": (8,), "rounds": 0}
TOKENS_DEFAULTS = TAU_DEFAULTS | {"forms": ("dynamic",), "nodes": (4, 15), "batch": (16,)}
NOISE_DEFAULTS = TAU_DEFAULTS | {"forms": ("noiseless", "dynamic")}
NOISE_DEFAULTS |= {"temperatures": (0.5, 0.7, 1.0, 1.3)}
LOOKUP_DEFAULTS = TAU_DEFAULTS | {"forms": ("dynamic", "lookup", "both"), "nodes": (15,)}
ALL_FORMS = ("dynamic", "static", "both", "chain", "stock", "ngram")


def case(quick: dict[str, Any], plot: Plot, **defaults: Any) -> Case:
    """A benchmark of this module."""
    return Case(with_defaults(**defaults), run, COLUMNS, QUICK | quick, plot, text)


BY_NODES = Plot("nodes", ("tau",), ("drafter", "form"))
SPEED = case({"nodes": (7,), "chain": (3,)}, Plot("batch", ("ratio", "tau")))
LOAD = case({"batch": (1, 8)}, Plot("batch", ("ratio",)), **LOAD_DEFAULTS)
TAU = case({"nodes": (4,), "rounds": 0}, BY_NODES, **TAU_DEFAULTS)
BY_TOKENS = Plot("training_tokens", ("tau",), ("kind", "nodes"))
TOKENS = case({"nodes": (4,), "rounds": 0}, BY_TOKENS, **TOKENS_DEFAULTS)
NOISE = case({"nodes": (4,), "rounds": 0}, BY_NODES, **NOISE_DEFAULTS)
LOOKUP = case({"rounds": 0}, BY_NODES, **LOOKUP_DEFAULTS)
DRAFTERS = case({"nodes": (7,), "rounds": 0}, BY_NODES, **TAU_DEFAULTS | {"forms": ALL_FORMS})
