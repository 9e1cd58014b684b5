"""The demo's output: texts with their draft tokens marked, a table of figures, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_medusa.offline.acceptance import Acceptance
from vllm_medusa.offline.batch import Answer, Result
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.in_turn import InTurn
from vllm_medusa.offline.prompts import Prompt

DRAFT_STYLE = "black on green"
PROMPT_STYLE = "dim"
_MARKS = ("«", "»")  # where there is no colour
_BAR_WIDTH = 40
_PANEL_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One way of running the prompts, and what came of it."""

    name: str
    comparison: InTurn


def opening(
    console: Console,
    target: Path,
    heads: Path | None,
    prompts: Sequence[Prompt],
    sampled: Sampling,
    dtype: str,
) -> None:
    """Say what is going to be run."""
    console.print(
        f"[bold]Plain vLLM and vLLM with tree Medusa[/], {dtype} on CPU, {len(prompts)} prompts, "
        f"up to {sampled.max_tokens} tokens each.\n"
        f"Sampled: temperature {sampled.temperature:g}, the same seed for a prompt in both "
        "engines. Greedy: temperature 0."
    )
    console.print(f"target {target}\nheads  {heads or 'none (--no-medusa)'}", soft_wrap=True)


def draft_flags(delivered: Sequence[int]) -> list[bool]:
    """Say of each generated token whether it was drafted and accepted.

    ``delivered`` has the tokens of each engine step, the prefill step first. The last token of a
    step is the target's own, all before it were drafts.
    """
    return [i < tokens - 1 for tokens in delivered for i in range(tokens)]


def marked_text(answer: Answer, pieces: Sequence[str], *, colour: bool) -> Text:
    """The generated text with its draft tokens in colour, or else between marks.

    ``pieces`` are the texts of its tokens. Without ``colour`` there are ``«`` and ``»`` around each
    run of draft tokens.
    """
    text = Text()
    inside = False
    for piece, drafted in zip(pieces, draft_flags(answer.delivered), strict=True):
        if not colour and drafted != inside:
            text.append(_MARKS[0] if drafted else _MARKS[1])
            inside = drafted
        text.append(piece, style=DRAFT_STYLE if drafted else "")
    if inside:
        text.append(_MARKS[1])
    return text


def texts(
    console: Console, results: Sequence[Result], pieces: Callable[[list[int]], list[str]]
) -> None:
    """Show generated texts, with their drafts marked and a legend."""
    colour = console.color_system is not None
    legend = Text("\n")
    legend.append("prompt", style=PROMPT_STYLE)
    legend.append("  |  the target's own token  |  ")
    if colour:
        legend.append("drafted by the heads and accepted", style=DRAFT_STYLE)
    else:
        legend.append(f"{_MARKS[0]}drafted by the heads and accepted{_MARKS[1]}")
    console.print(legend)
    for result in results:
        answer = result.answers[0]
        body = Text(_prompt_text(result.prompt), style=PROMPT_STYLE)
        if not colour:
            body.append(" | ")
        body.append_text(marked_text(answer, pieces(answer.token_ids), colour=colour))
        acceptance = result.acceptance
        subtitle = f"{len(answer.token_ids)} tokens in {acceptance.steps + 1} steps"
        console.print(
            Panel(
                body,
                title=f"prompt {result.prompt.request_id}, sampled",
                subtitle=subtitle,
                width=min(console.width, _PANEL_WIDTH),
            )
        )


def figures(console: Console, rows: Sequence[Row]) -> None:
    """Print the table of both engines' figures."""
    table = Table(title="tokens per second, prefill included", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("plain", "Medusa", "ratio", "tau", "steps", "identical"):
        table.add_column(name, justify="right")
    for row in rows:
        c = row.comparison
        tau = c.candidate.acceptance.tau
        same = c.requests - len(c.differences)
        table.add_row(
            row.name,
            f"{c.baseline.tokens_per_second:.0f}",
            f"{c.candidate.tokens_per_second:.0f}",
            f"{c.ratio:.2f}x",
            "-" if tau is None else f"{tau:.2f}",
            f"{c.baseline.acceptance.steps} -> {c.candidate.acceptance.steps}",
            f"{same}/{c.requests}",
            style="" if c.identical else "bold red",
        )
    console.print()
    console.print(table)
    console.print(
        "tau: tokens per verification step. A model this small loops under greedy decoding, which "
        "flatters tau; the sampled rows are the ones to look at.",
        style="dim",
    )
    if any(row.comparison.ratio < 1 for row in rows):
        console.print(
            "A ratio below 1x: with few cores a step soon takes longer with every node, and other "
            "work on these cores slows the wider step most. Use an idle machine or fewer nodes "
            "(--num-speculative-tokens).",
            style="yellow",
        )


def histogram(console: Console, row: Row) -> None:
    """Print how many draft tokens the steps accepted."""
    acceptance: Acceptance = row.comparison.candidate.acceptance
    console.print(f"\naccepted draft tokens per step ({row.name}):")
    most = max(acceptance.histogram, default=0)
    for length, count in enumerate(acceptance.histogram):
        bar = "#" * max(1 if count else 0, round(_BAR_WIDTH * count / most))
        console.print(f"  {length:>2}  {bar:<{_BAR_WIDTH}}  {count / acceptance.steps:6.1%}")


def verdict(console: Console, rows: Sequence[Row]) -> bool:
    """Say whether all tokens are identical, and where not; returns that."""
    requests = sum(row.comparison.requests for row in rows)
    tokens = sum(row.comparison.baseline.tokens for row in rows)
    console.print()
    if all(row.comparison.identical for row in rows):
        console.print(
            f"[bold green]IDENTICAL[/]: all {tokens} tokens of {requests} requests are the same "
            "with tree Medusa as with plain vLLM."
        )
        return True
    different = sum(len(row.comparison.differences) for row in rows)
    console.print(f"[bold red]DIFFERENT[/]: {different} of {requests} requests differ.")
    for row in rows:
        for d in row.comparison.differences[:3]:
            console.print(
                f"  {row.name}, prompt {d.prompt.request_id}, round {d.round + 1}: first "
                f"different {d.reason} at token {d.position}: plain {d.baseline}, "
                f"Medusa {d.candidate}"
            )
    return False


def near_ties(console: Console) -> None:
    """Say why bfloat16 may differ."""
    console.print(
        "In bfloat16 the rounding of a matrix product depends on how many rows it has, in plain "
        "vLLM too, so near-ties of the target can fall otherwise. In float32 they do not.",
        style="yellow",
    )


def _prompt_text(prompt: Prompt) -> str:
    return prompt.text if prompt.text is not None else prompt.turns[0]
