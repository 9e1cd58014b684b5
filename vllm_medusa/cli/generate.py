"""`vllm-medusa generate` and `distill`: a file of prompts in, a file of results or records out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_medusa.cli.console import ConsoleProgress, invocation
from vllm_medusa.job import plural
from vllm_medusa.offline.options import DistillOptions, GenerateOptions

if TYPE_CHECKING:
    from vllm_medusa.offline.generate import Generated

GENERATE = """\
Generate for every prompt of a file and write one JSON line per prompt, in order of completion. If
killed or interrupted, run the same command again to resume: no line is duplicated or lost.
---
Prompts: a text file (one per line), JSON lines or Parquet. A row has "prompt" (continued as
is), "messages" or "turns" (conversations, in the model's chat template if it has one).

Results: index (position in the file, from 0), request_id, text, token_ids, finish_reason,
stop_reason and acceptance (steps, accepted_draft_tokens, tokens_per_step, histogram); "turns" holds
each turn's answer when there are several. A prompt that can't be run has "error" instead."""

DISTILL = """\
Generate training texts for heads with the target: it continues each prompt of a file one or more
times, through vLLM. If killed or interrupted, run the same command again to resume: the texts are
the same as without the interruption.
---
Prompts: as for `generate`.

Records: index, request_id, group, token_ids, generated ([start, end) of each generated span),
temperature, seed, finish_reason and text. A conversation is one record with a span for each
answer, or several records if an answer's tokens in the next prompt differ from those generated.
Records of one prompt share a group, which splits keep together."""


def run(options: GenerateOptions, progress: ConsoleProgress) -> int:
    """Generate, and print the speed; returns 1 if a prompt failed."""
    from vllm_medusa.offline.generate import generate

    return _conclude(generate(options, progress), "results", progress)


def run_distill(options: DistillOptions, progress: ConsoleProgress) -> int:
    """Generate training texts, and print the speed; returns 1 if a prompt failed."""
    from vllm_medusa.training.distill import distill

    return _conclude(distill(options, progress, invocation()), "records", progress)


def _conclude(done: Generated, what: str, progress: ConsoleProgress) -> int:
    if done.speed is not None:
        progress.note(str(done.speed))
    progress.note(f"{what} in {done.output}")
    if not done.failed:
        return 0
    progress.note(
        f"{plural(done.failed, 'prompt')} could not be run; their lines have an 'error'. To retry, "
        "remove these lines and run the command again."
    )
    return 1
