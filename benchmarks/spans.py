"""Timers around the parts of an engine's step, by wrapping methods of the live objects.

Every span measures *exclusive* time: the time of a nested span is not counted in the outer one, so
the spans of a step add up to its total time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# Parts that exist only with trees; the others exist in plain vLLM too.
OWN = (
    "tree layout",
    "tree plan",
    "verification",
    "compaction",
    "drafter",
    "drafter's entries",
    "drafting, rest",
)


class Spans:
    """Exclusive seconds per label since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def take(self) -> dict[str, float]:
        """Return the collected times, and reset them."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def hook(self, owner: Any, name: str, label: str, within: dict[str, str] | None = None) -> None:
        """Time `owner.name`, if it exists, as ``label``.

        ``within`` maps the label of the directly enclosing span to the label to use instead.
        """
        function: Callable[..., Any] | None = getattr(owner, name, None)
        if function is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            around = self._stack[-1] if self._stack else ""
            self._enter((within or {}).get(around, label))
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, timed)

    def _enter(self, label: str) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._stack.append(label)
        self._since = now

    def _leave(self) -> None:
        now = time.perf_counter()
        self._seconds[self._stack.pop()] += now - self._since
        self._since = now


def hook_engine(llm: Any) -> Spans:
    """Time the parts of an in-process engine, for any kind of speculation."""
    spans = Spans()
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    spans.hook(engine, "step", "engine, rest")
    spans.hook(engine.output_processor, "process_outputs", "detokenization, outputs")
    for name in ("schedule", "update_from_output", "update_draft_token_ids"):
        spans.hook(core.scheduler, name, "scheduler")
    spans.hook(runner, "execute_model", "runner, rest")
    spans.hook(runner, "sample_tokens", "runner, rest")
    spans.hook(runner, "_update_states", "batch state")
    spans.hook(runner, "_prepare_inputs", "inputs")
    spans.hook(runner, "_build_attention_metadata", "attention metadata")
    spans.hook(runner, "_model_forward", "forward without attention")
    spans.hook(runner, "_bookkeeping_sync", "bookkeeping")
    drafting = OWN[-3:]
    in_drafter = dict(zip(drafting, drafting, strict=True))
    spans.hook(runner.model, "compute_logits", "LM head", within=in_drafter)
    layers = runner.compilation_config.static_forward_context.values()
    for kind in {type(layer.impl) for layer in layers if hasattr(layer, "impl")}:
        spans.hook(kind, "forward", "attention", within=in_drafter)
        spans.hook(kind, "attend", "attention", within=in_drafter)  # of steps with trees
    speculates = runner.speculative_config is not None
    spans.hook(runner, "_sample", "verification" if speculates else "sampling")
    spans.hook(runner, "propose_draft_token_ids", "drafting, rest")
    spans.hook(runner, "take_draft_token_ids", "drafting, rest")  # trees: after tokens are sent
    if hasattr(runner, "trees"):  # our runner
        from vllm_medusa.integration import request_trees
        from vllm_medusa.integration.attention import cpu_attention

        spans.hook(runner.drafter, "draft", "drafter")
        for name in ("prefill", "prefill_on_host", "enter"):
            spans.hook(runner.drafter, name, "drafter's entries")  # EAGLE's cache and its roots
        spans.hook(runner.trees, "compact", "compaction")
        spans.hook(request_trees.TreeStep, "build", "tree layout")
        spans.hook(request_trees, "write_positions", "tree layout")
        spans.hook(cpu_attention, "plan_trees", "tree plan")
    return spans
