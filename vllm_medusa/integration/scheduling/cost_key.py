"""What step costs depend on; stored costs are used only if all of it is equal."""

from __future__ import annotations

import os
import platform
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from vllm_medusa.integration.startup.options import TreeSettings, absolute, is_for_v2
from vllm_medusa.plugin import installed_vllm
from vllm_medusa.tree.dynamic import Beam


def cost_key(config: Any) -> dict[str, str]:
    """Everything that step costs depend on, as far as known in advance."""
    model, options = config.model_config, TreeSettings.of(config)
    pool = getattr(options.tree, "pool", None)
    return {
        "target": absolute(str(model.model)),
        "revision": str(model.revision),
        "heads": options.heads or "",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "device": f"{current_platform.get_device_name()} {platform.machine()}",
        "threads": f"{os.cpu_count()} {envs.VLLM_CPU_OMP_THREADS_BIND}",
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "ranks": str(config.parallel_config.tensor_parallel_size),
        "eager": str(model.enforce_eager),
        "adapters": str(config.lora_config is not None),
        "runner": "V2" if is_for_v2(config.speculative_config) else "V1",
        "vllm": installed_vllm()[1] or "",
        "beam": str(pool) if isinstance(pool, Beam) else "",
        "lookup": str(options.lookup),
    }
