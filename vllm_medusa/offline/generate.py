"""The generate job, and code shared with distill: a file of prompts run through vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.files import digest, fingerprint
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import AcceptanceCounts, Conversation, Result, Session
from vllm_medusa.offline.defaults import CHANGE_MODEL, measure, read_limits
from vllm_medusa.offline.engine import Sampling, check_drafter, start_seconds, without_memory
from vllm_medusa.offline.options import GenerateOptions, PromptJob
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt, PromptError, load_prompts
from vllm_medusa.offline.results import ResultLog


@dataclass(frozen=True)
class Speed:
    """Throughput of one engine run; ``tau`` is None if nothing was verified."""

    tokens: int
    seconds: float
    tau: float | None

    def __str__(self) -> str:
        tau = f", {self.tau:.2f} tokens per step" if self.tau else ""
        rate = self.tokens / self.seconds
        return f"{self.tokens} tokens in {self.seconds:.1f} s ({rate:.1f} per second){tau}"


@dataclass(frozen=True)
class Generated:
    """A file of results, or of records."""

    output: Path
    failed: int  # prompts with an error
    speed: Speed | None  # of the remaining prompts; None: none remained


def generate(options: GenerateOptions, progress: Progress = SILENT) -> Generated:
    """Generate for every prompt that has no result yet."""
    prompts = load_prompts(options.prompts, options.column, options.on_bad_line, progress)
    sampling = Sampling(
        options.max_tokens, options.temperature, options.top_p, options.top_k, options.stop
    )
    if options.speculation() is None:
        progress.note("plain vLLM, without speculation: no --speculative-model")
    with open_results(options, sampling, options.seed) as log:
        speed = run_prompts(
            options,
            log,
            [prompt for prompt in prompts if prompt.index not in log.done],
            sampling,
            options.seed,
            lambda result: [result.to_dict()],
            total=len(prompts),
            done=len(log.done),
            progress=progress,
        )
        return Generated(options.output, log.failed, speed)


def open_results(
    options: PromptJob,
    sampling: Sampling,  # of all requests
    seed: int | None,  # of the first prompt
    more: Mapping[str, Any] | None = None,  # further settings that results depend on
    provenance: Mapping[str, Any] | None = None,
) -> ResultLog:
    """Open the output, bound to all settings that the results depend on.

    Local checkpoints are identified by their digests, independent of their paths.
    """
    prompts: Path | None = options.prompts  # None: a job without prompts
    engine = without_memory(options.llm_arguments())
    speculation = engine["speculative_config"] or {}
    checkpoints = {}
    for name, place in (("model", engine), ("speculative_model", speculation)):
        if place.get("model") and Path(place["model"]).exists():
            checkpoints[name] = fingerprint(Path(place["model"]))
            place["model"] = None
    tree = options.speculative_config.get("tree")
    tree = tree if isinstance(tree, str) else None
    settings = {
        "prompts_sha256": None if prompts is None else digest(prompts),
        "suffix": None if prompts is None else prompts.suffix.lower(),
        "checkpoints": checkpoints,
        "tree_sha256": digest(Path(tree)) if tree and Path(tree).is_file() else None,
        "column": options.column,
        "engine": engine,
        "sampling": asdict(sampling) | {"seed": seed},
        **(more or {}),
    }
    return ResultLog(options.output, settings, overwrite=options.overwrite, provenance=provenance)


def run_prompts(
    options: PromptJob,
    log: ResultLog,  # receives the lines
    prompts: Iterable[Prompt],  # unfinished prompts
    sampling: Sampling,  # of all requests, with their highest temperature
    seed: int | None,  # prompt ``index`` uses ``seed + index``
    lines: Callable[[Result], Sequence[Mapping[str, Any]]],  # converts a result to output lines
    *,
    total: int,  # all prompts of the job
    done: int,  # prompts finished before
    session: Callable[[Prompt], Session] = Conversation,  # creates the session of a prompt
    progress: Progress = SILENT,
) -> Speed | None:
    """Generate for prompts and write each one's lines as soon as it is finished.

    Returns the throughput; None if nothing was left to do.
    """
    if log.torn_bytes:
        progress.note(f"removed an incomplete last line ({log.torn_bytes} bytes)")
    if done:
        progress.note(f"resuming: {done} of {total} are done")
    if done >= total:
        progress.note("nothing to do")
        return None
    acceptance, tokens, prompts = AcceptanceCounts(), 0, list(prompts)
    check_drafter(options.llm_arguments())
    if options.prompts is not None and options.on_bad_line == "refuse":
        refuse_unanswerable(options, prompts, progress)
    progress.note(f"starting vLLM (about {start_seconds(options.engine_args)} s)")
    with EngineProcess(options.llm_arguments(), sampling, seeded=seed is not None) as engine:
        engine.session = session
        start = time.perf_counter()
        for result in engine.stream(prompts, options.batch, seed):
            written = lines(result)
            if result.error is not None and any("error" in line for line in written):
                source = options.prompts or "conversation"
                message = f"{source}, line {result.prompt.line}: {result.error}"
                if options.on_bad_line == "refuse":
                    kept = "Finished prompts are kept. Pass --on-bad-line skip."
                    raise PromptError(f"{message}\n{kept}")
                progress.warn(f"skipped {message}")
            for line in written:
                log.append(line)
            acceptance.update(result.acceptance)
            tokens, done = tokens + result.num_tokens, done + 1
            tau = acceptance.tau or 1.0  # 1: without drafts
            more = f"tau {tau:.2f}" if tau > 1 else ""
            progress.at("generating", done, total, more)
        return Speed(tokens, time.perf_counter() - start, acceptance.tau)


def refuse_unanswerable(
    options: PromptJob, prompts: Sequence[Prompt], progress: Progress = SILENT
) -> None:
    """Refuse now the prompts that the engine would refuse later, perhaps after hours."""
    arguments = options.llm_arguments()
    if CHANGE_MODEL & arguments.keys():
        return
    try:
        limits = read_limits(options.model, arguments)
    except ValueError:  # vLLM supports more models
        return
    each = {prompt.line: prompt for prompt in prompts}  # one sample of each
    measure(options.prompts, each.values(), *limits, options.on_bad_line, progress)
