"""What step costs depend on; stored costs are used only where all of it is equal."""

from __future__ import annotations

import os
import platform
from typing import Any

from vllm import envs
from vllm.platforms import current_platform

from vllm_medusa.integration import compat
from vllm_medusa.integration.startup.options import TreeSettings, absolute
from vllm_medusa.plugin import installed_vllm
from vllm_medusa.tree.dynamic import Beam


def cost_key(config: Any) -> dict[str, str]:
    """Everything that step costs depend on, as far as known in advance."""
    model, parallel = config.model_config, config.parallel_config
    options = TreeSettings.of(config)
    pool = getattr(options.tree, "pool", None)
    return {
        "target": absolute(str(model.model)),
        "revision": str(model.revision),
        "heads": options.heads or "",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "device": f"{current_platform.get_device_name()} {platform.machine()}",
        "threads": f"{os.cpu_count()} {envs.VLLM_CPU_OMP_THREADS_BIND}",
        "ranks": str(parallel.tensor_parallel_size),
        "eager": str(model.enforce_eager),
        "adapters": str(config.lora_config is not None),
        "runner": "V2" if compat.uses_v2_runner(parallel) else "V1",
        "vllm": installed_vllm()[1] or "",
        "beam": str(pool) if isinstance(pool, Beam) else "",
        "lookup": str(options.lookup),
    }
