"""The plugin's scheduler without an engine, for simulated workers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from vllm_medusa.worker.scheduler import TreeScheduler, tree_scheduler

BLOCK, BLOCKS = 16, 200


def new_scheduler(
    target: str, speculative: dict[str, Any], *, ahead: bool = False, **limits: Any
) -> TreeScheduler:
    """A scheduler for requests of up to 256 tokens; ``ahead``: asynchronous."""
    config = EngineArgs(
        target, dtype="float32", max_model_len=256, enable_prefix_caching=False,
        speculative_config=speculative, **limits,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return tree_scheduler(
        config, kv_cache, manager, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True
    )
