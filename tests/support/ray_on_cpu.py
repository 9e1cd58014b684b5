"""vLLM's Ray executor on CPUs, which vLLM refuses without devices that Ray can count.

Ray is given a GPU count equal to the number of ranks, but never uses one; in the driver and every
worker, vLLM's CPU platform reports its devices as GPUs.
"""

from __future__ import annotations

import os

# Ray gives its server and node 30 s to start, workers 60 s; other tests may use the cores.
PATIENCE_S = 300
LIMITS = {
    "RAY_gcs_server_port_wait_time_s": PATIENCE_S,
    "RAY_raylet_start_wait_time_s": PATIENCE_S,
    "RAY_worker_register_timeout_seconds": PATIENCE_S,
    "RAY_agent_register_timeout_ms": 1000 * PATIENCE_S,
}


def call_cpus_gpus() -> None:
    """Report vLLM's CPU platform as a Ray GPU device; Ray calls this in every worker."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def start_ray(num_devices: int) -> None:
    """A local cluster that ends with this process; vLLM's engine process joins it."""
    os.environ |= {name: str(limit) for name, limit in LIMITS.items()}
    import ray  # reads the variables

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
