"""The report of `adapt`: what was done, what came of it, and how it is used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_medusa.adapt.checks import REPORT
from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.pipeline import CALIBRATED, COUNTS, FIGURES, PICTURE
from vllm_medusa.adapt.plan import Plan
from vllm_medusa.adapt.stages import Finished
from vllm_medusa.files import new_folder, read_json, write_json
from vllm_medusa.job import plural
from vllm_medusa.offline import comparison
from vllm_medusa.offline.machine import format_machine

PAGE = "report.md"
_NAMES = {"medusa": "Medusa heads", "hydra": "Hydra heads", "eagle3": "An EAGLE-3 drafter"}
_WEAK_TAU = 1.5
_TWO_TARGETS = """\
The texts to train and calibrate on, from which the tree and the expected tau come, were written \
by the original target, not by the one trained with these heads, which was measured and is served.

"""


def collect(plan: Plan, stages: Mapping[str, Finished], command: Sequence[str]) -> dict[str, Any]:
    """Everything of the report, as plain JSON values, read from the stages' results."""
    from vllm_medusa.heads.provenance import provenance

    options = plan.options
    medusa = read_json(_final(stages) / "config.json")["medusa"]
    measured = read_json(stages["compare"].folder / FIGURES)
    counts = read_json(stages["split"].folder / COUNTS)
    parts = dict(zip(("trained", "calibrated", "measured"), counts["prompts"], strict=True))
    return {
        "key": plan.key,
        "target": {"name": options.target, **plan.target},
        "drafter": options.drafter,
        "method": options.method,
        "prompts": {
            "file": options.prompts.name,
            "sha256": plan.prompts_digest,
            "different": plan.different,
            "left_out_records": counts["left_out"],
            "trained_tokens": counts["tokens"][0],
            "disjoint": counts["disjoint"],
            **parts,
        },
        "seed": options.seed,
        "dtype": options.dtype,
        "temperature": options.temperature,
        "training": medusa.get("training"),
        "calibration": medusa.get("calibration"),
        "tree": medusa.get("tree"),
        "expected": _expected(stages, measured),
        "num_draft_tokens": len(medusa["tree"]) if "tree" in medusa else measured["fastest"],
        "num_draft_tokens_asked": options.num_draft_tokens,
        "measured": measured,
        "stages": [
            {"stage": name, "command": stage.command, "seconds": round(stage.seconds, 1)}
            for name, stage in stages.items()
        ],
        "provenance": provenance(list(command), [options.prompts]),
    }


def publish(plan: Plan, document: dict[str, Any], stages: Mapping[str, Finished]) -> None:
    """Write the output folder, all of it or nothing."""
    from vllm_medusa.heads.checkpoint import update_config

    final, trained = _final(stages), stages["train"].folder / "heads"
    figures = document["measured"]
    names = ("dtype", "temperature", "batch", "machine", "fastest", "rows", "automatic")
    with new_folder(plan.options.output, overwrite=True) as part:
        for name in CALIBRATED:
            if (final / name).is_file():  # drafters are not calibrated
                shutil.copyfile(final / name, part / name)
        update_config(
            part,
            measured={name: figures.get(name) for name in names},
            provenance=document["provenance"],
        )
        if (trained / "target").is_dir():
            shutil.copytree(trained / "target", part / "target")
        draw_budgets(document, part / "budgets.png")
        pictures = [trained / "training" / "curves.png"]
        if "calibrate" in stages:
            pictures.append(final.parent / PICTURE)
        for picture in pictures:
            shutil.copyfile(picture, part / picture.name)
        (part / PAGE).write_text(markdown(plan.options, document), encoding="utf-8")
        write_json(part / REPORT, document)


def conclusion(document: dict[str, Any]) -> str:
    """What was measured and what follows, in a few sentences."""
    nodes, asked = document["num_draft_tokens"], document["num_draft_tokens_asked"]
    if document["tree"] is None:
        tree = f'The drafter builds its trees itself; "budget": {nodes} limits them to that size.'
    else:
        more = "" if asked in (None, nodes) else f" ({asked} were asked for: it can have no more)"
        tree = f'The heads\' own tree has {plural(nodes, "draft node")}{more}; "tree": "heads" '
        tree += "serves it. Without that, trees are dynamic."
    said = [comparison.conclusion(document["measured"]), tree]
    best = max(row["tau"] or 1 for row in document["measured"]["rows"])
    if best < _WEAK_TAU:
        said.append(
            f"{best:.2f} tokens per step is little: more text to train on than "
            f"{document['prompts']['trained_tokens']} tokens may help (more prompts, --samples, "
            "--max-tokens)."
        )
    return " ".join(said)


def markdown(options: AdaptOptions, document: dict[str, Any]) -> str:
    """The page."""
    measured, prompts, target = document["measured"], document["prompts"], document["target"]
    provenance, output, kind = document["provenance"], options.output, document["drafter"]
    joint, grown = document["method"] == "medusa-2", document["tree"] is not None
    how = document["method"].capitalize() if kind == "medusa" else _NAMES[kind]
    unseen = (
        "neither trained nor calibrated on"
        if prompts["disjoint"]
        else "not trained on, but calibrated on: there were too few"
    )
    eager = bool(measured["engine_args"].get("enforce_eager"))
    rows = [(s["stage"], s["seconds"], s["command"]) for s in document["stages"]]
    stages = "\n".join(
        f"| {name} | {seconds:.0f} | {f'`{did}`' if did.startswith('vllm-medusa ') else did} |"
        for name, seconds, did in rows
    )
    versions = [f"{name} {version}" for name, version in provenance["versions"].items()]
    if git := provenance["git"]:
        versions.append(f"commit {git['revision'][:12]}{' with changes' * git['changed']}")
    return f"""\
# {_NAMES[kind]} for {target["name"]}

{conclusion(document)}

```
vllm-medusa serve {f"{output}/target" if joint else options.target} --speculative-model {output}
```

## Beside plain vLLM

{comparison.setting(measured)} These prompts were {unseen}.

{chr(10).join(comparison.markdown(measured))}

{_expectations(document)}\
tau: tokens per verification step. Ratio: throughput over plain vLLM's, the median of the rounds; \
both engines took turns on the same machine.{" Both ran eagerly, without torch.compile." * eager}

{_TWO_TARGETS * joint}\
![ratio and tau by budget](budgets.png){" ![the tree](tree.png)" * grown}

## What the heads know

{_accuracies(document)}

![training](curves.png)

## How they were made

{how}, seed {document["seed"]}, {measured["dtype"]}; \
{prompts["trained"]} prompts of {prompts["file"]} (SHA-256 {prompts["sha256"][:12]}) to train on \
({prompts["trained_tokens"]} tokens of the target's), {prompts["calibrated"]} to calibrate on, \
{prompts["measured"]} to measure on. Target weights {target["sha256"][:12]}.

| stage | seconds | command |
|---|---|---|
{stages}

{format_machine(measured["machine"])}; {", ".join(versions)}.

Command: `{" ".join(provenance["command"])}`
"""


def _expectations(document: dict[str, Any]) -> str:
    """How far the tau that `tree` expected was off."""
    found = []
    for row in document["measured"]["rows"]:
        expected = document["expected"][str(row["num_draft_tokens"])]
        if expected is not None and row["tau"]:
            error = 100 * (expected / row["tau"] - 1)
            found.append(
                f"{plural(row['num_draft_tokens'], 'node')} {expected:.2f} "
                f"({abs(error):.0f} % {'above' if error >= 0 else 'below'} the measured)"
            )
    return f"Expected tau, from calibration: {'; '.join(found)}.\n\n" if found else ""


def _accuracies(document: dict[str, Any]) -> str:
    """Held-out accuracy of each head as a table."""
    heldout = (document["training"] or {}).get("heldout")
    if not heldout:
        return "(not measured)"
    lines = ["| head | token | top 1 | top 5 | top 10 |", "|---|---|---|---|---|"]
    for head, top in enumerate(heldout["top"]):
        at = [f"{top[min(rank, len(top)) - 1]:.3f}" for rank in (1, 5, 10)]
        lines.append(f"| {head} | t + {head + 2} | {' | '.join(at)} |")
    lines += ["", f"Shares of {heldout['labels']} generated tokens of the calibration prompts."]
    return "\n".join(lines)


def _final(stages: Mapping[str, Finished]) -> Path:
    """The folder of the heads that are published."""
    return (stages["final-tree"] if "final-tree" in stages else stages["train"]).folder / "heads"


def _expected(stages: Mapping[str, Finished], measured: dict[str, Any]) -> dict[str, float | None]:
    """What `tree` expected of each measured size: tokens per step, held out where it could be."""
    source = {}
    if "tree" in stages:
        config = read_json(stages["tree"].folder / "heads" / "config.json")
        source = config["medusa"].get("tree_source", {})
    walked = source.get("tokens_per_step") or []
    heldout = source.get("tokens_per_step_heldout") or []
    found: dict[str, float | None] = {}
    for row in measured["rows"]:
        size = row["num_draft_tokens"]
        of = [taus[size - 1] for taus in (heldout, walked) if len(taus) >= size]
        found[str(size)] = next((tau for tau in of if tau is not None), None)
    return found


def draw_budgets(document: dict[str, Any], path: Path) -> None:
    """Ratio of throughputs (its bar from the worst to the best round) and tau by tree size."""
    rows = document["measured"]["rows"]
    sizes = [row["num_draft_tokens"] for row in rows]
    ratios = [row["ratio"] for row in rows]
    errors = [
        [row["ratio"] - min(row["ratios"]) for row in rows],
        [max(row["ratios"]) - row["ratio"] for row in rows],
    ]
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.errorbar(sizes, ratios, yerr=errors, fmt="s-", capsize=3, label="throughput / plain's")
    axes.plot(sizes, [row["tau"] or 1 for row in rows], "o-", label="tau, measured")
    expected = [(size, document["expected"][str(size)]) for size in sizes]
    if known := [pair for pair in expected if pair[1] is not None]:
        axes.plot(*zip(*known, strict=True), "x", color="0.3", label="tau, expected")
    axes.axhline(1, color="0.5", linewidth=1)
    if automatic := document["measured"].get("automatic"):
        axes.axhline(automatic["ratio"], color="C3", linestyle="--", label="throughput, automatic")
    axes.set(xlabel="draft nodes", title=f"beside plain vLLM, {document['measured']['dtype']}")
    axes.legend()
    figure.savefig(path, format="png", dpi=110)
