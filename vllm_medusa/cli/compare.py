"""`vllm-medusa compare`: heads against plain vLLM for several tree sizes."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from vllm_medusa.cli.console import ConsoleProgress, figures, invocation, stdout_console
from vllm_medusa.offline.options import CompareOptions

TEXT = """\
Compare vLLM with heads to plain vLLM: both run the same prompts, in turn, once for each size of the
heads' tree and once with dynamic trees ("automatic"). Reported are whether all tokens agree, the
tokens per verification step (tau) and the throughput ratio. The exit status is 1 if a token differs
in float32.
---
If the prompts are records of `distill`, the tokens before the first generated span are used. Each
distinct prompt is used once, and every request has its own seed.

A tree lists the best nodes first, so its first N nodes are the tree of that budget. Both engines
alternate, so a ratio is meaningful even on a busy machine; tokens per second are not."""


def run(options: CompareOptions, progress: ConsoleProgress) -> int:
    """Compare, and print the figures; 1 if a token differs in float32."""
    from vllm_medusa.offline.comparison import compare, conclusion, passed, setting

    document = compare(options, progress, invocation())
    console = stdout_console()
    console.print(setting(document), soft_wrap=True)
    console.print(table(document))
    console.print(conclusion(document), soft_wrap=True)
    if options.output is not None:
        console.print(f"figures in {options.output}", soft_wrap=True)
    return 0 if passed(document) else 1


def table(document: dict[str, Any]) -> Table:
    """Return the table for a terminal."""
    from vllm_medusa.offline import comparison

    title = f"compared with plain vLLM, {document['dtype']}"
    result = figures(*comparison.COLUMNS, title=title, title_justify="left")
    for row in comparison.all_rows(document):
        best = row["num_draft_tokens"] == document["fastest"]
        result.add_row(*comparison.cells(row), style="bold" if best else "")
    return result
