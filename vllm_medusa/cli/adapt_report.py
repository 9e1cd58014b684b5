"""The report of `vllm-medusa adapt`: what was done, what came of it, and how it is used."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_medusa.cli.adapt_checks import REPORT, Facts
from vllm_medusa.cli.adapt_pictures import draw_accuracies, draw_budgets
from vllm_medusa.cli.stages import WorkFolder, write_json
from vllm_medusa.offline import comparison as compare_report
from vllm_medusa.offline.machine import machine_in_words

PAGE = "report.md"
FORMAT_VERSION = 1
_HEADS = ("model.safetensors", "calibration.safetensors")


def collect(
    args: argparse.Namespace,
    facts: Facts,
    key: str,
    work: WorkFolder,
    folders: Mapping[str, Path],
) -> dict[str, Any]:
    """Everything of the report, as plain JSON values, read from the stages' results."""
    from vllm_medusa.heads.provenance import provenance

    medusa = _read(folders["final-tree"] / "heads" / "config.json")["medusa"]
    measured = _read(folders["compare"] / "compare.json")
    counts = _read(folders["split"] / "counts.json")
    return {
        "format_version": FORMAT_VERSION,
        "key": key,
        "target": {"name": str(args.target), **facts.target},
        "method": args.method,
        "prompts": {
            "file": args.prompts.name,
            "sha256": facts.prompts_digest,
            "different": facts.prompts,
            **dict(zip(("trained", "calibrated", "measured"), counts["prompts"], strict=True)),
            "left_out_records": counts["left_out"],
            "trained_tokens": counts["tokens"][0],
            # by its counts in a split of before this was noted: one prompt may have been for both
            "disjoint": counts.get("disjoint", counts["prompts"][1:] != [1, 1]),
        },
        "seed": args.seed,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "training": medusa.get("training"),
        "calibration": medusa.get("calibration"),
        "tree": medusa["tree"],
        "expected": _expected(folders["tree"] / "heads" / "config.json", measured),
        "num_draft_tokens": len(medusa["tree"]),
        "num_draft_tokens_fixed": args.num_draft_tokens is not None,
        "num_draft_tokens_asked": args.num_draft_tokens,
        "measured": measured,
        "stages": [
            {"stage": name, "command": work.commands[name], "seconds": round(seconds, 1)}
            for name, seconds in work.seconds.items()
        ],
        "provenance": provenance(["vllm-medusa", *sys.argv[1:]], [args.prompts]),
    }


def publish(
    args: argparse.Namespace, document: dict[str, Any], folders: Mapping[str, Path]
) -> None:
    """Write the output folder, all of it or nothing."""
    from vllm_medusa.heads.checkpoint import update_config

    output: Path = args.output.resolve()  # a link to a folder can't be replaced by one
    part = output.with_name(f".{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    heads = folders["final-tree"] / "heads"
    for name in ("config.json", *_HEADS):
        shutil.copyfile(heads / name, part / name)
    figures = document["measured"]
    update_config(
        part,
        measured={
            name: figures[name]
            for name in ("dtype", "temperature", "batch", "machine", "fastest", "rows")
        },
        provenance=document["provenance"],
    )
    if (trained := folders["train"] / "heads" / "target").is_dir():
        shutil.copytree(trained, part / "target")
    draw_accuracies(document, part / "accuracy.png")
    draw_budgets(document, part / "budgets.png")
    for picture in (
        folders["final-tree"] / "tree.png",
        folders["calibrate"] / "calibration.png",
        folders["train"] / "heads" / "training" / "curves.png",
    ):
        shutil.copyfile(picture, part / picture.name)
    (part / PAGE).write_text(markdown(args, document), encoding="utf-8")
    write_json(part / REPORT, document)
    _sync(part)
    if output.exists():
        old = output.with_name(f".{output.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        output.rename(old)
        part.rename(output)
        shutil.rmtree(old)
    else:
        part.rename(output)


def conclusion(document: dict[str, Any]) -> str:
    """What was measured and what follows, in a few sentences."""
    said = compare_report.conclusion(document["measured"])
    nodes = document["num_draft_tokens"]
    if document["num_draft_tokens_fixed"]:
        asked = document.get("num_draft_tokens_asked", nodes)
        if nodes < asked:
            return (
                f"{said} The heads' tree has {nodes} draft nodes: {asked} were asked for, and it "
                "can have no more."
            )
        return f"{said} The heads' tree has the {nodes} draft nodes that were asked for."
    return f"{said} The first {nodes} nodes of the tree became the heads' own."


def markdown(args: argparse.Namespace, document: dict[str, Any]) -> str:
    """The page."""
    measured, prompts = document["measured"], document["prompts"]
    served = f"{args.output}/target" if document["method"] == "medusa-2" else str(args.target)
    versions = document["provenance"]["versions"]
    git = document["provenance"]["git"]
    lines = [
        f"# Medusa heads for {document['target']['name']}",
        "",
        conclusion(document),
        "",
        "```",
        f"vllm-medusa serve {served} --speculative-model {args.output}",
        "```",
        "",
        "## Beside plain vLLM",
        "",
        compare_report.setting(measured)
        + (
            " These prompts were neither trained nor calibrated on."
            if prompts["disjoint"]
            else " These prompts were not trained on, but calibrated on: there were too few."
        ),
        "",
        *compare_report.markdown(measured),
        "",
        *_expectations(document),
        "tau: tokens per verification step. Ratio: throughput over plain vLLM's, the median of the "
        "rounds; both engines took turns on the same machine. "
        + (
            "Both ran eagerly, without torch.compile. "
            if measured["engine_args"].get("enforce_eager")
            else ""
        )
        + "",
        "",
        *_of_two_targets(document),
        "![ratio and tau by budget](budgets.png) ![the tree](tree.png)",
        "",
        "## What the heads know",
        "",
        *_accuracies(document),
        "",
        "![held-out accuracy](accuracy.png) ![training](curves.png)",
        "![calibration](calibration.png)",
        "",
        "## How they were made",
        "",
        f"{document['method'].capitalize()}, seed {document['seed']}, "
        f"{measured['dtype']}; {prompts['trained']} prompts of {prompts['file']} "
        f"(SHA-256 {prompts['sha256'][:12]}) to train on ({prompts['trained_tokens']} tokens of "
        f"the target's), {prompts['calibrated']} to calibrate on, {prompts['measured']} to measure "
        f"on. Target weights {document['target']['sha256'][:12]}.",
        "",
        "| stage | seconds | command |",
        "|---|---|---|",
        *(f"| {s['stage']} | {s['seconds']:.0f} | `{s['command']}` |" for s in document["stages"]),
        "",
        f"{machine_in_words(measured['machine'])}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + (
            f"; commit {git['revision'][:12]}{' with changes' if git['changed'] else ''}"
            if git
            else ""
        )
        + ".",
        "",
        f"Command: `{' '.join(document['provenance']['command'])}`",
    ]
    return "\n".join(lines) + "\n"


def _expectations(document: dict[str, Any]) -> list[str]:
    """How far the tau that `tree` expected was off."""
    found = []
    for row in document["measured"]["rows"]:
        expected = document["expected"][str(row["num_draft_tokens"])]
        if expected is not None and row["tau"]:
            error = 100 * (expected / row["tau"] - 1)
            found.append(
                f"{row['num_draft_tokens']} nodes {expected:.2f} "
                f"({abs(error):.0f} % {'above' if error >= 0 else 'below'} the measured)"
            )
    if not found:
        return []
    return [f"Expected tau, from calibration: {'; '.join(found)}.", ""]


def _of_two_targets(document: dict[str, Any]) -> list[str]:
    """Whose texts the tree was grown on, where the target was trained too."""
    if document["method"] != "medusa-2":
        return []
    return [
        "The texts to train and calibrate on, from which the tree and the expected tau come, were "
        "written by the original target, not by the one trained with these heads, which was "
        "measured and is served.",
        "",
    ]


def _accuracies(document: dict[str, Any]) -> list[str]:
    """Held-out accuracy of each head as a table."""
    heldout = (document["training"] or {}).get("heldout")
    if not heldout:
        return ["(not measured)"]
    lines = ["| head | token | top 1 | top 5 | top 10 |", "|---|---|---|---|---|"]
    for head, top in enumerate(heldout["top"]):
        at = [top[min(rank, len(top)) - 1] for rank in (1, 5, 10)]
        lines.append(f"| {head} | t + {head + 2} | " + " | ".join(f"{x:.3f}" for x in at) + " |")
    lines += ["", f"Shares of {heldout['labels']} generated tokens of the calibration prompts."]
    return lines


def _expected(config: Path, measured: dict[str, Any]) -> dict[str, float | None]:
    """What `tree` expected of each measured size: tokens per step, held out where it could be."""
    source = _read(config)["medusa"].get("tree_source", {})
    walked = source.get("tokens_per_step") or []
    heldout = source.get("tokens_per_step_heldout") or []
    found: dict[str, float | None] = {}
    for row in measured["rows"]:
        size = row["num_draft_tokens"]
        of = [taus[size - 1] for taus in (heldout, walked) if len(taus) >= size]
        found[str(size)] = next((tau for tau in of if tau is not None), None)
    return found


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
