"""What `vllm-medusa compare` says: setting, table, conclusion, as JSON, for terminals and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vllm_medusa.offline.machine import describe_machine, machine_in_words
from vllm_medusa.offline.prompts import Prompt

FORMAT_VERSION = 1
COLUMNS = ("draft nodes", "tau", "steps", "ratio", "min-max", "tokens identical")


def opening(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    temperature: float,
    budgets: Sequence[int],
    engine_args: Mapping[str, Any],
) -> dict[str, Any]:
    """The document before anything is measured."""
    from vllm_medusa.heads.provenance import provenance

    data = args.data or args.prompts
    return {
        "format_version": FORMAT_VERSION,
        "target": str(args.target),
        "heads": str(args.heads),
        "data": data.name,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": temperature,
        "seed": args.seed,
        "batch": args.batch,
        "rounds": args.rounds,
        "budgets": list(budgets),
        "engine_args": dict(engine_args),
        "dtype": None,
        "machine": describe_machine(),
        "provenance": provenance(["vllm-medusa", *sys.argv[1:]], [data]),
        "rows": [],
        "fastest": None,
    }


def is_document(document: Mapping[str, Any]) -> bool:
    """Whether this is a document of this command, of any version of its format."""
    keys = ("format_version", "target", "heads", "budgets", "rows", "fastest")
    return all(key in document for key in keys)


def setting(document: dict[str, Any]) -> str:
    """What is measured, in words."""
    mode = (
        f"temperature {document['temperature']:g}, seeded" if document["temperature"] else "greedy"
    )
    return (
        f"{document['prompts']} prompts of {document['data']}, up to {document['max_tokens']} new "
        f"tokens each, {mode}, batch {document['batch']}; {document['rounds']} rounds, plain vLLM "
        f"and vLLM with the heads in turn; {machine_in_words(document['machine'])}."
    )


def fastest(rows: Sequence[dict[str, Any]]) -> int | None:
    """The budget with the best ratio, of equal ones the smallest; None if there are no rows."""
    best = max(rows, key=lambda row: (row["ratio"], -row["num_draft_tokens"]), default=None)
    return None if best is None else best["num_draft_tokens"]


def cells(row: dict[str, Any]) -> list[str]:
    """One budget's figures, in the order of `COLUMNS`."""
    same = row["requests"] - row["differing_requests"]
    return [
        str(row["num_draft_tokens"]),
        "-" if row["tau"] is None else f"{row['tau']:.2f}",
        f"{row['plain_steps']} -> {row['steps']}",
        f"{row['ratio']:.2f}x",
        f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
        f"{same}/{row['requests']}",
    ]


def table(document: dict[str, Any]) -> Table:
    """The table for a terminal."""
    result = Table(title=f"beside plain vLLM, {document['dtype']}", title_justify="left")
    for column in COLUMNS:
        result.add_column(column, justify="right")
    for row in document["rows"]:
        best = row["num_draft_tokens"] == document["fastest"]
        result.add_row(*cells(row), style="bold" if best else "")
    return result


def markdown(document: dict[str, Any]) -> list[str]:
    """The same as lines of Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in document["rows"]:
        values = cells(row)
        if row["num_draft_tokens"] == document["fastest"]:
            values = [f"**{value}**" for value in values]
        lines.append(f"| {' | '.join(values)} |")
    return lines


def conclusion(document: dict[str, Any]) -> str:
    """Whether the tokens agree, and which budget is fastest, if any is."""
    rows = document["rows"]
    different = sum(row["differing_requests"] for row in rows)
    requests = sum(row["requests"] for row in rows)
    if not different:
        said = [f"All tokens of {requests} requests are plain vLLM's."]
    else:
        first = next(d for row in rows for d in row["differences"])
        said = [
            f"{different} of {requests} requests differ from plain vLLM's, the first "
            f"({first['request_id']}) at token {first['position']}."
        ]
        said.append(
            "In float32 that must not happen: please report it."
            if document["dtype"] == "float32"
            else f"In {document['dtype']} the rounding of a matrix product depends on how many "
            "rows it has, in plain vLLM too, so near-ties fall otherwise; float32 has none."
        )
    best = next(row for row in rows if row["num_draft_tokens"] == document["fastest"])
    size = f"{best['num_draft_tokens']} draft nodes"
    if best["ratio"] > 1:
        said.append(f"Fastest on this machine: {size}, {best['ratio']:.2f} times plain vLLM.")
        if min(best["ratios"]) <= 1:
            said.append("Not every round was faster, so the gain is within the noise.")
    else:
        said.append(
            f"No tree is faster than plain vLLM on this machine: the best, {size}, reaches "
            f"{best['ratio']:.2f} times its throughput. Heads pay where a step's time is spent "
            "loading weights: with larger targets, smaller batches, or more cores."
        )
    return " ".join(said)
