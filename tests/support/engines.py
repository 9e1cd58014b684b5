"""Real vLLM engines in this process, and how to read their state."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from support.metrics import added, assert_counted, counts, drafted_and_accepted, positions
from support.uncompiled import use_uncompiled
from vllm_medusa.integration.attention import forget_attention_backends
from vllm_medusa.integration.attention.cpu_attention import BACKENDS
from vllm_medusa.integration.startup.options import TreeSettings, has_trees

Prompt = list[int]

# vLLM inspects a model's class in another process, to avoid CUDA: eleven seconds each here.
registry._run_in_subprocess = lambda look: look()
use_uncompiled()


@dataclass(frozen=True)
class Completion:
    """All parts of a request's output that must not change."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    drafted: tuple[int, ...] = field(default=(), compare=False)  # per verification
    accepted: tuple[int, ...] = field(default=(), compare=False)


def start(model: str, speculative_config: dict[str, Any] | None = None, **changes: Any) -> LLM:
    """An engine for token ids in and out: fp32, eager, in this process."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 64 << 20,
    }
    if speculative_config is None:  # an engine with trees has registered its attention permanently
        for name in BACKENDS:
            AttentionBackendEnum[name].clear_override()
        forget_attention_backends()
    else:
        options["per_request_spec_decode_metrics"] = "detailed"
    _freeze_imports()
    return LLM(model, speculative_config=speculative_config, **options | changes)


_freeze = gc.freeze


def _freeze_imports() -> None:
    """Exclude imported modules, but not engines, from garbage collection.

    vLLM collects garbage about ten times while an engine starts and stops: with a million imported
    objects this takes three seconds. It also freezes the objects of a started engine and thaws
    everything at its end; here imports stay frozen, and engines are collected.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


def inspect_in_this_process(model: str) -> None:
    """Store what vLLM finds out about a model's class, before other processes start engines.

    Otherwise each of them starts a process for it, which imports vLLM; see `registry` above.
    """
    EngineArgs(model=model).create_engine_config()


@contextmanager
def engine(
    model: str, speculative_config: dict[str, Any] | None = None, **changes: Any
) -> Iterator[LLM]:
    """An engine of `start` that is stopped at the end of the block.

    Only one can exist at a time: the end of any engine destroys vLLM's process groups for all.
    """
    llm = start(model, speculative_config, **changes)
    try:
        yield llm
    finally:
        stop(llm)


def medusa(heads: str, tree: Any = None, **options: Any) -> dict[str, Any]:
    return {"method": "medusa", "model": heads, "tree": tree, **options}


def stop(llm: LLM) -> None:
    """Shut down an in-process engine and free its memory."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def worker_of(llm: LLM) -> Any:
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker


def random_prompts(
    count: int, vocab: int, shortest: int = 1, longest: int = 400, seed: int = 0
) -> list[Prompt]:
    """Prompts of random ids (3 and up, so no special tokens), lengths spread evenly."""
    rng = random.Random(seed)
    return [
        [rng.randrange(3, vocab) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    """Greedy decoding, by default of exactly ``max_tokens`` tokens."""
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=max_tokens, **options | changes)


def generate(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[Any]:
    """Run requests, returned as ``RequestOutput``; vLLM's metrics must count exactly these."""
    before = counts(llm)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    lora: Any = None if adapters is None else list(adapters)
    results = llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
    assert_counted(added(before, counts(llm)), results)
    config = llm.llm_engine.vllm_config
    if has_trees(config.speculative_config):
        options = TreeSettings.of(config)
        depth = options.depth
        assert positions(llm) == depth
        stats = [output.spec_decode_metrics for result in results for output in result.outputs]
        lengths = {1 + depth}
        if any(
            each.structured_outputs for each in (params if isinstance(params, list) else [params])
        ):
            lengths.add(1 + options.tree.num_draft_tokens)  # runs forced by a grammar
        assert {len(each.histogram) for each in stats} <= lengths
    return results


def complete(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    return [completion_of(result.outputs[0]) for result in generate(llm, prompts, params)]


def completion_of(output: Any) -> Completion:
    """The parts to compare, of one of vLLM's ``CompletionOutput``."""
    return Completion(
        tuple(output.token_ids),
        output.finish_reason,
        output.stop_reason,
        *drafted_and_accepted(output),
    )


def metric(llm: LLM, name: str) -> int:
    """A counter of vLLM's metrics, by the end of its name."""
    return sum(m.value for m in llm.get_metrics() if m.name.endswith(name) and hasattr(m, "value"))


def drive(
    llm: LLM,
    arrivals: Sequence[tuple[int, Prompt, SamplingParams]],
    aborts: Mapping[int, int] | None = None,
) -> list[Completion]:
    """Step the engine manually: each request arrives at its step.

    ``aborts`` maps a request's index to the number of tokens after which it is aborted; it keeps
    its tokens so far. Steps without work are skipped.
    """
    waiting = sorted(range(len(arrivals)), key=lambda index: arrivals[index][0], reverse=True)
    engine, aborts, step = llm.llm_engine, dict(aborts or {}), 0
    latest: dict[int, Completion] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and arrivals[waiting[-1]][0] <= step:
            index = waiting.pop()
            _, prompt, params = arrivals[index]
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        for output in engine.step() if engine.has_unfinished_requests() else ():
            index = int(output.request_id)
            latest[index] = completion_of(output.outputs[0])
            if len(latest[index].token_ids) >= aborts.get(index, 1 << 30):
                aborts.pop(index)
                engine.abort_request([output.request_id])
        step += 1
    return [latest[index] for index in range(len(arrivals))]
