"""vLLM's counters, and whether they match the outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm import LLM

Counts = dict[str, float]
LEFT_OUT = ("model_name", "engine")  # labels that distinguish engines


def counts(llm: LLM) -> Counts:
    """All counters of an engine, under names like ``request_success{finished_reason=stop}``.

    Histograms give their buckets, count and sum; those over times, only the count.
    """
    found: Counts = {}
    for metric in llm.get_metrics():
        labels = ",".join(f"{k}={v}" for k, v in metric.labels.items() if k not in LEFT_OUT)
        name = metric.name.removeprefix("vllm:") + (f"{{{labels}}}" if labels else "")
        kind = type(metric).__name__
        if kind == "Counter":
            found[name] = metric.value
        elif kind == "Vector":
            found |= {f"{name}[{i}]": value for i, value in enumerate(metric.values)}
        elif kind == "Histogram":
            found[f"{name}.count"] = metric.count
            if not metric.name.endswith("_seconds"):
                found[f"{name}.sum"] = metric.sum
                found |= {f"{name}.{limit}": value for limit, value in metric.buckets.items()}
    return found


def positions(llm: LLM) -> int:
    """Number of positions of accepted tokens that are counted; 0 without speculation."""
    (values,) = [m.values for m in llm.get_metrics() if type(m).__name__ == "Vector"] or [[]]
    return len(values)


def added(before: Counts, after: Counts) -> Counts:
    """The increments, without unchanged counters."""
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in more.items() if value}


def drafted_and_accepted(output: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For a ``CompletionOutput``, verification by verification: drafts, and accepted drafts."""
    metrics = output.spec_decode_metrics
    if metrics is None:
        return (), ()
    return tuple(metrics.per_step_drafted), tuple(metrics.per_step_accepted)


def assert_counted(more: Counts, results: Sequence[Any]) -> None:
    outputs = [output for result in results for output in result.outputs]
    prompts = [len(result.prompt_token_ids) for result in results for _ in result.outputs]
    tokens = [len(output.token_ids) for output in outputs]
    steps = [drafted_and_accepted(output) for output in outputs]
    drafted, accepted = ([n for step in steps for n in step[part]] for part in (0, 1))
    wanted: Counts = {
        "prompt_tokens": sum(prompts),
        "generation_tokens": sum(tokens),
        "request_prompt_tokens.sum": sum(prompts),
        "request_generation_tokens.sum": sum(tokens),
        "request_generation_tokens.count": len(outputs),
        "time_to_first_token_seconds.count": len(outputs),
        "e2e_request_latency_seconds.count": len(outputs),
        "spec_decode_num_drafts": len(drafted),
        "spec_decode_num_draft_tokens": sum(drafted),
        "spec_decode_num_accepted_tokens": sum(accepted),
    }
    for reason, count in Counter(output.finish_reason for output in outputs).items():
        wanted[f"request_success{{finished_reason={reason}}}"] = count
    for place in range(max(accepted, default=0)):
        name = f"spec_decode_num_accepted_tokens_per_pos[{place}]"
        wanted[name] = sum(count > place for count in accepted)
    compared = {
        name: value
        for name, value in more.items()
        if name in wanted or name.startswith(("spec_decode", "request_success"))
    }
    if any(isinstance(output.stop_reason, str) for output in outputs):
        # the front end ends such a request: tokens of the step after the stop text are counted
        for name in ("generation_tokens", "request_generation_tokens.sum"):
            assert wanted[name] <= compared[name] < wanted[name] + 64 * len(outputs)
        own = ("generation_tokens", "request_generation_tokens.sum")
        for found in (compared, wanted):
            for name in [name for name in found if name.startswith(own)]:
                del found[name]
    assert compared == {name: value for name, value in wanted.items() if value}
