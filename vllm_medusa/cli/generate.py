"""`vllm-medusa generate`: a file of prompts in, a file of results out, resumable at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_medusa.cli.command import Command
from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.offline.options import GenerateOptions

if TYPE_CHECKING:
    from vllm_medusa.offline.generate import Generated
    from vllm_medusa.training.distill import Distilled

_DESCRIPTION = """\
Generate for every prompt of a file and write one JSON line per prompt, in the order in which they
finish. Killed or interrupted, the same command goes on where it stopped: no line is written twice
and none is lost."""

_EPILOG = """\
Prompts: a text file (one per line), JSON lines or Parquet. A row has "prompt" (continued as it
stands), "messages" or "turns" (a conversation: the model's chat template is used if it has one,
else the texts are joined as they are; each answer is part of the next turn's prompt).

Results: index (position in the file, from 0), request_id, text, token_ids, finish_reason,
stop_reason and acceptance (steps, accepted_draft_tokens, tokens_per_step, histogram); "turns" holds
each turn's answer when there are several. A prompt that can't be run has "error" instead."""


def run(options: GenerateOptions, progress: ConsoleProgress) -> int:
    """Generate, and say how fast; 1 if prompts have an error for a result."""
    from vllm_medusa.offline.generate import generate

    return conclude(generate(options, progress), "results", progress)


def conclude(done: Generated | Distilled, what: str, progress: ConsoleProgress) -> int:
    """Say how fast it was, what failed and where everything is; the exit status."""
    if done.speed is not None:
        progress.note(str(done.speed))
    progress.note(f"{what} in {done.output}")
    if not done.failed:
        return 0
    progress.note(
        f"{done.failed} prompts could not be run; their lines have an 'error'. To try them again, "
        "remove these lines and repeat the command."
    )
    return 1


COMMAND = Command(
    "generate",
    "generate for a file of prompts; resumable",
    GenerateOptions,
    run,
    _DESCRIPTION,
    _EPILOG,
    interrupted=lambda args: f"the same command goes on from {args.output}",
    engine=True,
)
