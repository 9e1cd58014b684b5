"""The speculative config of trees on V2: a subclass, because V2 refuses vLLM's Medusa by name."""

from __future__ import annotations

from vllm.config import SpeculativeConfig
from vllm.config.utils import config


@config
class TreeSpeculativeConfig(SpeculativeConfig):
    """Drafts from heads; ``num_speculative_tokens`` counts draft nodes.

    The method is called ``draft_model``: of the methods whose drafts stay on the device, which V2
    and the async scheduler check by name, it is the simplest. There is no draft model,
    however: no layers, no KV cache and no slots.
    """

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
