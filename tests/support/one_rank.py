"""vLLM's distributed state for one rank, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_rank(store: Path) -> Iterator[None]:
    """Within the block vLLM's layers can be built; ``store`` is a file that must not exist yet."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
