"""The distill job: the target continues prompts, and writes what its heads are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.generate import Speed, open_results, run_prompts
from vllm_medusa.offline.options import DistillOptions
from vllm_medusa.offline.prompts import Prompt, PromptError, load_prompts
from vllm_medusa.training.self_distillation import Plan, Summary
from vllm_medusa.training.self_talk import require_self_talk

_TALK_TURNS = 3


@dataclass(frozen=True)
class Distilled:
    """A file of records."""

    output: Path
    failed: int  # texts whose line is an error
    speed: Speed | None  # of what was left to do; None: nothing was
    summary: Summary  # of the whole file


def distill(
    options: DistillOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Distilled:
    """Let the target write each text that is not written yet.

    Raises:
        PromptError: the prompts can't be used; texts that were finished are kept.
        FileRefused: the output holds something else, or records of other settings.
        EngineRefused: vLLM or the plugin refuses the settings.

    """
    if options.prompts is not None:
        prompts = load_prompts(
            options.prompts, options.format, options.column, options.on_bad_line, progress
        )
    else:
        count = options.conversations or 0
        prompts = [Prompt(index, index + 1, f"talk-{index}") for index in range(count)]
    turns, talker = max(1, max(len(prompt.turns) for prompt in prompts)), None
    if options.self_talk:
        turns, talker = options.turns or _TALK_TURNS, _talker(options.model)
    plan = Plan(options.samples, options.temperature, options.seed, turns, talker)
    settings = {
        "samples": plan.samples,
        "temperatures": list(plan.temperatures),
        "self_talk": options.self_talk,
        "turns": plan.turns,
    }
    top_p, top_k, stop = options.top_p, options.top_k, options.stop
    sampling = Sampling(options.max_tokens, plan.temperatures[0], top_p, top_k, stop)
    cut = ({"top_p": top_p} if top_p < 1 else {}) | ({"top_k": top_k} if top_k > 0 else {})
    early, ended = 0, 0

    def lines(result: Result) -> list[Mapping[str, Any]]:
        nonlocal early, ended
        answers = sum(answer.role == "assistant" for answer in result.answers)
        early += options.self_talk and 0 < answers < plan.turns
        ended += bool(answers)
        return [r | cut for r in plan.records(result) if r["index"] not in log.done]

    origin = provenance(command, [options.prompts] if options.prompts is not None else [])
    with open_results(options, sampling, options.seed, {"texts": settings}, origin) as log:
        speed = run_prompts(
            options,
            log,
            plan.slots(prompts, frozenset(log.done)),
            sampling,
            options.seed,
            lines,
            total=len(prompts) * plan.samples,
            done=sum(index % plan.stride == 0 for index in log.done),
            seeded=any(plan.temperatures),
            session=plan.session,
            progress=progress,
        )
        if early:
            progress.warn(
                f"{early} of {ended} conversations ended before their {plan.turns} answers: a text "
                "was cut at --max-tokens, or a user's turn was empty"
            )
        return Distilled(options.output, log.failed, speed, Summary.of(options.output))


def _talker(model: str) -> Any:
    """The target's tokenizer, whose chat template shows where turns begin and end."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise PromptError(
            f"--self-talk needs the target's tokenizer, and {model} has none that can be read: "
            f"{error}"
        ) from None
    require_self_talk(tokenizer)
    return tokenizer
