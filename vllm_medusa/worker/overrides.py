"""The ledger of what is patched in vLLM: every entry says why and when it can go.

Subclassing comes first; a patch is the last resort, is applied at most once and passes through
whatever does not concern Medusa.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "__medusa_override__"


@dataclass(frozen=True)
class Override:
    """One patched attribute of vLLM."""

    target: str  # dotted name in vLLM
    why: str
    upstream: str  # where vLLM would have to change
    gone_when: str


LEDGER: tuple[Override, ...] = (
    Override(
        "EngineArgs.create_speculative_config",
        "Turns method='medusa' with a tree into a custom proposer whose draft length is the number "
        "of nodes; vLLM 0.32 ties it to the number of heads and refuses our keys.",
        "config/speculative.py: extra='forbid', MedusaConfig.num_lookahead_tokens",
        "vLLM lets plugins register a speculative method.",
    ),
    Override(
        "EngineArgs.create_engine_config",
        "Refuses unsupported combinations on the finished config, before any weight is loaded; "
        "adds sizes of CUDA graphs, which vLLM counts in tokens and ends at 512.",
        "no hook after VllmConfig is built",
        "general plugins get a config validation hook.",
    ),
    Override(
        "EngineArgs.add_cli_args",
        "Adds --speculative-model, which vLLM dropped.",
        "engine/arg_utils.py",
        "vLLM has the flag again, or users have moved to --speculative-config.",
    ),
    Override(
        "EngineArgs.from_cli_args",
        "Folds --speculative-model into the speculative config.",
        "engine/arg_utils.py",
        "together with the flag.",
    ),
    Override(
        "SamplingParams._validate_spec_decode",
        "A request with bad Medusa options must fail alone, in the front end.",
        "sampling_params.py: extra_args are not validated by anyone",
        "vLLM lets a proposer validate requests.",
    ),
    Override(
        "PrometheusStatLogger.__init__",
        "Counts accepted tokens by depth; vLLM has a counter for each draft token, so for each "
        "node of a tree, of which those beyond its depth never count.",
        "v1/spec_decode/metrics.py: positions are num_speculative_tokens",
        "vLLM asks the drafter how many positions a draft has.",
    ),
    Override(
        "LoggingStatLogger.__init__",
        "The same for its line of the log, whose words are for chains too.",
        "v1/metrics/loggers.py: SpecDecodingLogging is named there",
        "together with the counters.",
    ),
    Override(
        "AsyncLLM.shutdown",
        "Ends open requests with an error: on SIGTERM vLLM stops the engine, and streams wait for "
        "its tokens, the server for the streams, until the clients give up.",
        "v1/engine/async_llm.py: shutdown tells nobody; launcher.py waits for connections",
        "plain vLLM ends streams on SIGTERM.",
    ),
    Override(
        "ThinkingBudgetStateHolder.sync_batch (V1 runner, in workers)",
        "A request without a thinking budget that moves to the place of a finished one gets what "
        "is left of its budget, and the end of a thought that it never began.",
        "v1/sample/thinking_budget_state.py: a move without a state leaves the old one there",
        "vLLM clears the place, as its logits processors do.",
    ),
    Override(
        "DefaultModelLoader.get_all_weights (during load_model only)",
        "A full Medusa-2 checkpoint holds the heads beside the target, and vLLM's models refuse "
        "tensors they do not know.",
        "model_executor/models/utils.py: AutoWeightsLoader raises on unknown names",
        "a plugin can name prefixes to skip.",
    ),
    Override(
        "v1.worker.gpu.model_runner.init_speculator (V2 runner, in workers)",
        "Builds the speculator with trees, which brings all else that V2 needs.",
        "v1/worker/gpu/spec_decode/__init__.py: a closed list of methods",
        "V2 loads a custom speculator class by name, as V1 does proposers.",
    ),
    Override(
        "cpu_worker.CPUModelRunner (module global, during init_device only)",
        "CPUWorker names its runner class itself, where the GPU worker has a method to override.",
        "v1/worker/cpu_worker.py: init_device",
        "CPUWorker calls Worker._make_model_runner.",
    ),
)


def override(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Replace ``owner.name`` by ``make(original)``, keeping static and class methods what they are.

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
