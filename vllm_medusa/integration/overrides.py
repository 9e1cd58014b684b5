"""All patches of vLLM, each with its reason and when it can be removed.

Subclassing is preferred; a patch is applied at most once and does not affect code without Medusa.
A test finds patches that are not in the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

_MARK = "__medusa_override__"


class Override(NamedTuple):
    """One patched attribute of vLLM."""

    target: str  # dotted path
    why: str
    gone_when: str


OVERRIDES = (
    Override(
        "EngineArgs.create_speculative_config",
        "Turns method='medusa' with a tree into a custom proposer whose draft length is the number "
        "of nodes; vLLM 0.32 ties it to the number of heads and forbids other keys.",
        "vLLM lets plugins register a speculative method.",
    ),
    Override(
        "EngineArgs.create_engine_config",
        "Refuses unsupported combinations on the finished config, before any weight is loaded; "
        "adds CUDA graph sizes, which vLLM counts in tokens up to 512.",
        "general plugins get a hook after VllmConfig is built.",
    ),
    Override(
        "EngineArgs.add_cli_args",
        "Adds --speculative-model, which vLLM removed.",
        "vLLM restores the flag, or users have moved to --speculative-config.",
    ),
    Override(
        "EngineArgs.from_cli_args",
        "Merges --speculative-model into the speculative config.",
        "the flag is removed.",
    ),
    Override(
        "SamplingParams._validate_spec_decode",
        "Rejects invalid Medusa options in the front end, so that only that request fails; vLLM "
        "does not validate extra_args.",
        "vLLM lets a proposer validate requests.",
    ),
    Override(
        "PrometheusStatLogger.__init__",
        "Counts accepted tokens by depth; vLLM has one counter per draft token, i.e. per tree "
        "node, and those beyond the tree's depth would always be 0.",
        "vLLM queries the number of positions from the drafter.",
    ),
    Override(
        "LoggingStatLogger.__init__",
        "The same for its log line, which assumes chains.",
        "as for the counters.",
    ),
    Override(
        "LLMEngine.get_metrics",
        "Reads the metrics of this engine. vLLM reads the process's registry, from which each "
        "new engine removes the metrics of earlier ones.",
        "vLLM's engines in one process have separate metrics.",
    ),
    Override(
        "metrics.reader.REGISTRY",
        "Replaced while LLMEngine.get_metrics reads the metrics of its own engine.",
        "as for LLMEngine.get_metrics.",
    ),
    Override(
        "AsyncLLM.shutdown",
        "Fails open requests: on SIGTERM vLLM stops the engine, but streams wait for its tokens, "
        "and the server for the streams, until the clients disconnect.",
        "plain vLLM ends streams on SIGTERM.",
    ),
    Override(
        "ThinkingBudgetStateHolder.sync_batch",
        "V1, in workers: a request without a thinking budget that takes the slot of a finished "
        "one inherits its remaining budget and end-of-thinking state.",
        "vLLM clears the slot, as its logits processors do.",
    ),
    Override(
        "DefaultModelLoader.get_all_weights",
        "During load_model: a full Medusa-2 checkpoint holds the heads with the target, and "
        "vLLM's models refuse unknown tensors.",
        "a plugin can name prefixes to skip.",
    ),
    Override(
        "cpu_worker.CPUModelRunner",
        "During init_device: CPUWorker hardcodes its runner class; the GPU worker has a "
        "method to override.",
        "CPUWorker calls Worker._make_model_runner.",
    ),
    Override(
        "v1.worker.gpu.model_runner.init_speculator",
        "V2, in workers: builds the speculator with trees; vLLM has a closed list of methods.",
        "V2 loads a custom speculator class by name, as V1 does proposers.",
    ),
    Override(
        "target_model.get_model_state_cls",
        "V2: the loaded target returns our model state from this method, which V2 calls.",
        "V2 loads a custom speculator class by name, which provides its state.",
    ),
    Override(
        "RequestState.all_token_ids",
        "V2 with lookup: the requests' texts are in host memory by default, and each step searches "
        "all of them. vLLM replaces the table in the same way for its own n-grams.",
        "a speculator can request the table on the device.",
    ),
    Override(
        "LogitsProcessorWithLoRA.forward",
        "While heads draft: they use the target's own LM head, without the adapters of a step's "
        "rows, which differ from the heads' rows.",
        "vLLM's LM head can be called without adapters.",
    ),
    Override(
        "LogitsProcessor.soft_cap",
        "While the rows of a draft vocabulary are read: a cap is not linear, so it is excluded.",
        "vLLM's models return their LM head's weights in any layout.",
    ),
)


def override(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``replacement(original, ...)``; a second call changes nothing.

    Static and class methods remain static and class methods. vLLM may load plugins more than once.
    """
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    original = raw.__func__ if kind else raw
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(call, _MARK, True)
    setattr(owner, name, kind(call) if kind else call)
