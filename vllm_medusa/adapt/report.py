"""The report of an adapt run: measurements, stages, and the command that serves the heads."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.pipeline import CALIBRATED, COUNTS, FIGURES, HEADS
from vllm_medusa.adapt.plan import REPORT, Plan
from vllm_medusa.adapt.stages import Finished
from vllm_medusa.files import new_folder, read_json, write_json
from vllm_medusa.job import plural
from vllm_medusa.offline import comparison
from vllm_medusa.offline.machine import format_machine

_PAGE = "report.md"
_NAMES = {"medusa": "Medusa heads", "hydra": "Hydra heads", "eagle3": "An EAGLE-3 drafter"}
_WEAK_TAU = 1.5


def collect(plan: Plan, stages: Mapping[str, Finished], command: Sequence[str]) -> dict[str, Any]:
    """The report's data from the stages' results, plain JSON."""
    from vllm_medusa.heads.provenance import provenance

    options = plan.options
    heads = (stages.get("tree") or stages["train"]).folder  # EAGLE-3 drafters have no tree
    medusa = read_json(heads / HEADS[0])["medusa"]
    measured = read_json(stages["compare"].folder / FIGURES)
    counts = read_json(stages["split"].folder / COUNTS)
    parts = dict(zip(("trained", "calibrated", "measured"), counts["prompts"], strict=True))
    tree = medusa["tree"] if "tree" in stages else None
    return {
        "key": plan.key,
        "target": {"name": options.target, **plan.target},
        "drafter": options.heads.kind,
        "method": options.method,
        "prompts": {
            "file": options.prompts.name,
            "sha256": plan.prompts_digest,
            "skipped_records": counts["skipped_records"],
            "trained_tokens": counts["tokens"][0],
            "disjoint": counts["disjoint"],
            **parts,
        },
        "seed": options.training.seed,
        "training": medusa.get("training"),
        "tree": tree and tree[: measured["fastest"]],  # best node first
        "tree_source": medusa.get("tree_source"),
        "measured": measured,
        "stages": [
            {"stage": name, "command": stage.command, "seconds": round(stage.seconds, 1)}
            for name, stage in stages.items()
        ],
        "provenance": provenance(list(command), [options.prompts]),
    }


def publish(plan: Plan, document: dict[str, Any], stages: Mapping[str, Finished]) -> None:
    """Write the output folder atomically."""
    from vllm_medusa.heads.checkpoint import update_config

    trained, figures, tree = stages["train"].folder, document["measured"], document["tree"]
    names = ("dtype", "temperature", "batch", "machine", "fastest", "rows", "automatic")
    entries: dict[str, Any] = {"measured": {name: figures.get(name) for name in names}}
    copied = [trained / name for name in HEADS]
    if tree is not None:
        copied = [stages["tree"].folder / name for name in CALIBRATED]
        taus = document["tree_source"]["tokens_per_step"][: len(tree)]
        entries |= {"tree": tree, "tree_tokens_per_step": taus}
    copied.append(trained / "heads" / "training" / "curves.png")
    with new_folder(plan.options.output, overwrite=True) as part:
        for file in copied:
            shutil.copyfile(file, part / file.name)
        update_config(part, **entries, provenance=document["provenance"])
        if (trained / "heads" / "target").is_dir():
            shutil.copytree(trained / "heads" / "target", part / "target")
        (part / _PAGE).write_text(markdown(plan.options, document), encoding="utf-8")
        write_json(part / REPORT, document)


def conclusion(document: dict[str, Any]) -> list[str]:
    """Sentences that summarize the measurements."""
    nodes = document["measured"]["fastest"]
    if document["tree"] is None:
        tree = f'The drafter builds its trees itself; "budget": {nodes} limits them to that size.'
    else:
        tree = (
            "Automatic trees, the default, need no option. The heads' config also has a static "
            f'tree of {plural(nodes, "draft node")}, for "tree": "heads".'
        )
    sentences = [*comparison.conclusion(document["measured"]), tree]
    best = max(row["tau"] or 1 for row in document["measured"]["rows"])
    if best < _WEAK_TAU:
        sentences.append(
            f"{best:.2f} tokens per step is low: more training text than "
            f"{document['prompts']['trained_tokens']} tokens may help (more prompts, --samples, "
            "--max-tokens)."
        )
    return sentences


def markdown(options: AdaptOptions, document: dict[str, Any]) -> str:
    """The report as Markdown."""
    measured, prompts, target = document["measured"], document["prompts"], document["target"]
    provenance, output, kind = document["provenance"], options.output, document["drafter"]
    joint = document["method"] == "medusa-2"
    unseen = "" if prompts["disjoint"] else " (except calibration: there were too few)"
    served = f"{output}/target" if joint else options.target
    notes = []
    if source := document["tree_source"]:
        taus = source["tokens_per_step_heldout"] or source["tokens_per_step"]
        sizes = [row["num_draft_tokens"] for row in measured["rows"]]
        expected = ", ".join(f"{taus[size - 1]:.2f} with {size}" for size in sizes)
        notes.append(f"Expected tau from calibration: {expected} draft nodes.")
    if joint:
        notes.append("All texts were generated by the original target, not by the measured one.")
    accuracies = ["| head | depth | top 1 | top 5 | top 10 |", "|---|---|---|---|---|"]
    for head, top in enumerate(document["training"]["heldout"]["top"]):
        at = [f"{top[min(rank, len(top)) - 1]:.3f}" for rank in (1, 5, 10)]
        accuracies.append(f"| {head} | {head + 1} | {' | '.join(at)} |")
    rows = [f"| {s['stage']} | {s['seconds']:.0f} | {s['command']} |" for s in document["stages"]]
    versions = [f"{name} {version}" for name, version in provenance["versions"].items()]
    newline = "\n"
    return f"""\
# {_NAMES[kind]} for {target["name"]}

{newline.join(f"- {sentence}" for sentence in conclusion(document))}

```
vllm-medusa serve {served} --speculative-model {output}
```

## Comparison with plain vLLM

{comparison.setting(measured)} These prompts were used for nothing else{unseen}.

{newline.join(comparison.markdown(measured))}

tau: tokens per step. Ratio: throughput relative to plain vLLM, median of the rounds; \
both engines alternated on the same machine. {" ".join(notes)}

## Accuracy of the heads

Fraction of {document["training"]["heldout"]["labels"]} generated tokens of the calibration prompts:

{newline.join(accuracies)}

![training](curves.png)

## How they were made

Method {document["method"]}, seed {document["seed"]}, {measured["dtype"]}; \
{prompts["trained"]} prompts of {prompts["file"]} (SHA-256 {prompts["sha256"][:12]}) to train on \
({prompts["trained_tokens"]} generated tokens), {prompts["calibrated"]} to calibrate on, \
{prompts["measured"]} to measure on. Target weights {target["sha256"][:12]}.

| stage | seconds | command |
|---|---|---|
{newline.join(rows)}

{format_machine(measured["machine"])}; {", ".join(versions)}.

Command: `{shlex.join(provenance["command"])}`
"""
