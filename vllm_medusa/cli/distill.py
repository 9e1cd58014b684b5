"""`vllm-medusa distill`: the target continues prompts, and writes what its heads are trained on."""

from __future__ import annotations

from vllm_medusa.cli.command import Command, invocation
from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.cli.generate import conclude
from vllm_medusa.training.options import DistillOptions

_DESCRIPTION = """\
Let the target write the texts that its heads are trained on: it continues every prompt of a file,
as often as wanted, through vLLM. Killed or interrupted, the same command goes on where it stopped;
the texts are those of an uninterrupted run (their lines stand in the order in which they were
finished)."""

_EPILOG = """\
Prompts: as for `generate`. "prompt" is continued as it stands, "messages" and "turns" are rendered
in the target's chat template.

Records: index, request_id, group, token_ids, generated ([start, end) of what the target wrote),
temperature, seed, finish_reason and text. A conversation is one record with a span for each answer;
where the template or the tokenizer renders an answer otherwise than it was written, the
conversation falls into several. Records of one prompt have one group, which no split divides."""


def run(options: DistillOptions, progress: ConsoleProgress) -> int:
    """Let the target write, and say what; 1 if prompts have an error for a record."""
    from vllm_medusa.training.distill import distill

    done = distill(options, progress, invocation())
    made, lengths = done.summary, done.summary.generated
    if lengths:
        progress.note(
            f"{made.records} records: {made.prompt_tokens} prompt tokens, {sum(lengths)} "
            f"generated (of each {min(lengths)} to {max(lengths)}, mean "
            f"{sum(lengths) / len(lengths):.1f}); {made.truncated / made.records:.1%} "
            f"truncated, {made.duplicates} duplicates, {made.empty} empty"
        )
    return conclude(done, "records", progress)


COMMAND = Command(
    "distill",
    "let the target write training texts for its heads; resumable",
    DistillOptions,
    run,
    _DESCRIPTION,
    _EPILOG,
    interrupted=lambda args: f"the same command goes on from {args.output}",
    engine=True,
)
