"""`vllm-medusa train`: heads for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from vllm_medusa.cli.console import ConsoleProgress, figures, hide_loading_bars, invocation
from vllm_medusa.training.options import TrainOptions

if TYPE_CHECKING:
    from vllm_medusa.training.train import Trained

TEXT = """\
Train heads for a target on texts, preferably its own (`vllm-medusa distill`). If killed or
interrupted, run the same command again to resume: the final weights are the same, bit for bit.
Several GPUs: `accelerate launch --num-processes N -m vllm_medusa.cli train ...`.
---
Data: JSON lines with "token_ids" and "generated" (distill's records), "messages" or "conversations"
(ShareGPT), of which the assistant turns are trained on, or "text", which is trained on as a whole.

Output: model.safetensors and config.json as vLLM reads them, training/log.jsonl (a line for each
step and each measurement), training/curves.png and training/heldout.jsonl, the held-out records:
calibrate on these. Until the run is complete, training/work holds its state."""

_RANKS = (1, 2, 3, 5, 10)


def run(options: TrainOptions, progress: ConsoleProgress) -> int:
    """Train, and print quality metrics; returns 1 if the target degraded too much."""
    from vllm_medusa.training.train import train

    hide_loading_bars()
    trained = train(options, progress, invocation())
    if trained.main:
        _show(trained, progress)
    return int(trained.degraded)


def _show(trained: Trained, progress: ConsoleProgress) -> None:
    summary = trained.summary
    if summary.get("heldout"):
        progress.console.print(_accuracies(summary["heldout"]))
    if summary.get("quality"):
        progress.console.print(_quality(summary["quality"], summary["bounds"]))
    if trained.model is None:
        progress.note(f"heads in {trained.output}")
    elif not trained.degraded:
        progress.note(f"new target: {trained.model}; heads: {trained.output}")
    else:
        text = f"[bold red]degraded:[/] {escape(trained.degradation)}"
        progress.console.print(text, soft_wrap=True)


def _accuracies(heldout: dict[str, Any]) -> Table:
    names = ("head", "loss", *(f"top {rank}" for rank in _RANKS))
    table = figures(*names, title=f"held out, {heldout['labels']} labels")
    for head, (loss, top) in enumerate(zip(heldout["loss"], heldout["top"], strict=True)):
        shares = (f"{top[rank - 1]:.1%}" for rank in _RANKS)
        table.add_row(str(head), _number(loss, ".3f"), *shares)
    return table


def _quality(quality: dict[str, Any], bounds: dict[str, Any]) -> Table:
    title = f"the new target, merged, on {quality['num_tokens']} held-out tokens"
    table = figures("", "value", "allowed", title=title)
    for words, name, form, bound in (
        ("KL(original || new), nats per token", "kl", ".4g", "max_kl"),
        ("perplexity before", "perplexity_before", ".4f", ""),
        ("perplexity after", "perplexity_after", ".4f", ""),
        ("after / before", "perplexity_ratio", ".4f", "max_perplexity_ratio"),
    ):
        allowed = f"{bounds[bound]:g}" if bound else ""
        table.add_row(words, _number(quality[name], form), allowed)
    return table


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
