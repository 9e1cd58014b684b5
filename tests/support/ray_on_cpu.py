"""vLLM's Ray executor on CPUs, which vLLM refuses for want of a device that Ray would count.

Ray is told of as many GPUs as ranks are wanted and never asked for one; in the driver and in every
worker vLLM's CPU platform says that its devices are called so.
"""

from __future__ import annotations

import os


def call_cpus_gpus() -> None:
    """What Ray counts as a device of vLLM's CPU platform; Ray calls this in every worker."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def start_ray(num_devices: int) -> None:
    """A local cluster that ends with this process; vLLM's engine process joins it."""
    import ray

    call_cpus_gpus()
    cluster = ray.init(
        num_cpus=num_devices,
        num_gpus=num_devices,
        include_dashboard=False,
        object_store_memory=80 << 20,
        runtime_env={
            "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]},
            "worker_process_setup_hook": f"{__name__}.call_cpus_gpus",
        },
    )
    os.environ["RAY_ADDRESS"] = cluster.address_info["gcs_address"]
