"""The speculative config of trees on V2: a subclass, because V2 refuses vLLM's Medusa by name."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.config.utils import config


@config
class TreeSpeculativeConfig(SpeculativeConfig):
    """Drafts from heads; ``num_speculative_tokens`` counts draft nodes.

    The method is called ``draft_model``: of the methods whose drafts stay on the device, which V2
    and the async scheduler check by name, it is the simplest. There is no draft model,
    however: no layers, no KV cache and no slots.
    """

    medusa_acceptance: dict[str, Any] = field(default_factory=dict)
    """The engine's acceptance rule, for the front end."""

    def __post_init__(self) -> None:
        """Use the target's configs for the draft: heads have no config that vLLM can read."""
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    def uses_draft_model(self) -> bool:
        """False: heads are not a model, so nothing is reserved for one."""
        return False

    def __repr__(self) -> str:
        return f"TreeSpeculativeConfig(num_draft_nodes={self.num_speculative_tokens})"


def tree_speculative_config(
    drafter: str,
    num_draft_tokens: int,
    acceptance: dict[str, Any],
    model_config: Any,
    parallel_config: Any,
    has_budget: bool = False,
) -> TreeSpeculativeConfig:
    """Create the config; ``drafter`` is the marker that `options.is_medusa` checks.

    With a budget, many steps have no drafts. vLLM captures full CUDA graphs for them, and for
    whole trees, if its own draft-length schedule has both; our scheduler sets the counts.
    With data-parallel replicas vLLM would ignore a schedule with a warning.
    """
    wanted = has_budget and parallel_config.data_parallel_size == 1
    schedule = [(1, 1, num_draft_tokens), (2, 2, 0)] if wanted else None
    return TreeSpeculativeConfig(
        num_speculative_tokens_per_batch_size=schedule,
        method="draft_model",
        model=drafter,
        num_speculative_tokens=num_draft_tokens,
        medusa_acceptance=acceptance,
        target_model_config=model_config,
        target_parallel_config=parallel_config,
    )
