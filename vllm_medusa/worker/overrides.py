"""All patches of vLLM, each with its reason and when it can be removed.

Subclassing is preferred; a patch is applied at most once and does not affect code without Medusa.
A test finds patches that are not on the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

_MARK = "__medusa_override__"


class Override(NamedTuple):
    """One patched attribute of vLLM."""

    target: str  # its name ends with the attribute's
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
        "adds sizes of CUDA graphs, which vLLM counts in tokens and ends at 512.",
        "general plugins get a hook after VllmConfig is built.",
    ),
    Override(
        "EngineArgs.add_cli_args",
        "Adds --speculative-model, which vLLM dropped.",
        "vLLM has the flag again, or users have moved to --speculative-config.",
    ),
    Override(
        "EngineArgs.from_cli_args",
        "Folds --speculative-model into the speculative config.",
        "the flag goes.",
    ),
    Override(
        "SamplingParams._validate_spec_decode",
        "A request with bad Medusa options must fail alone, in the front end; nothing in vLLM "
        "validates extra_args.",
        "vLLM lets a proposer validate requests.",
    ),
    Override(
        "PrometheusStatLogger.__init__",
        "Counts accepted tokens by depth; vLLM has a counter for each draft token, so for each "
        "node of a tree, of which those beyond its depth never count.",
        "vLLM asks the drafter how many positions a draft has.",
    ),
    Override(
        "LoggingStatLogger.__init__",
        "The same for its log line, which assumes chains.",
        "the counters do.",
    ),
    Override(
        "LLMEngine.get_metrics",
        "Reads the metrics of this engine. vLLM reads the process's registry, from which each "
        "engine that starts removes the metrics of those before.",
        "vLLM's engines in one process have metrics of their own.",
    ),
    Override(
        "AsyncLLM.shutdown",
        "Fails open requests: on SIGTERM vLLM stops the engine, and streams wait for its tokens, "
        "the server for the streams, until the clients give up.",
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
        "During load_model: a full Medusa-2 checkpoint holds the heads beside the target, and "
        "vLLM's models refuse tensors they do not know.",
        "a plugin can name prefixes to skip.",
    ),
    Override(
        "cpu_worker.CPUModelRunner",
        "During init_device: CPUWorker names its runner class itself, where the GPU worker has a "
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
        "V2: the loaded target brings our model state, which V2 asks the model for by this name.",
        "V2 loads a custom speculator class by name, which brings its state.",
    ),
    Override(
        "RequestState.all_token_ids",
        "V2 with lookup: the requests' texts lie in host memory by default, and each step searches "
        "them all. vLLM replaces the table in the same way for its own n-grams.",
        "a speculator can ask for the table on the device.",
    ),
    Override(
        "LogitsProcessorWithLoRA.forward",
        "While heads draft: they take the target's own LM head, without the adapters of a step's "
        "rows, which the heads' rows are not.",
        "vLLM's LM head can be called without adapters.",
    ),
    Override(
        "LogitsProcessor.soft_cap",
        "While the rows of a draft vocabulary are read: a cap is not linear, so not in the rows.",
        "vLLM's models give their LM head's weights whatever their layout.",
    ),
)


def override(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Replace ``owner.name`` by ``make(original)``, preserving static and class methods.

    Returns:
        False if the attribute is our override already (vLLM may load plugins more than once).

    """
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    original = raw.__func__ if kind else raw
    if getattr(original, _MARK, False):
        return False
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, kind(replacement) if kind else replacement)
    return True
