"""The CUDA attention under vLLM's V2 runner on a CPU (`support.triton_on_cpu`).

vLLM selects its attention by platform, and on CPUs supports only one; so ours is registered as
CPU_ATTN. Its own Triton kernels for the cache and for steps without trees are interpreted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.v1.worker import cpu_worker  # noqa: F401  (fits V2's modules to the CPU first)

from support.interpreter import trust_integers
from vllm_medusa.integration import attention, request_trees
from vllm_medusa.integration.attention import cuda_attention
from vllm_medusa.integration.v2 import cuda_warmup
from vllm_medusa.scorer import launch

NUM_SMS = 8  # enough that small batches have their keys split


@contextmanager
def triton_attention_on_cpu() -> Iterator[None]:
    """Engines with trees started within the block run the CUDA attention."""

    trust_integers()
    limits = launch.device_limits(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cuda_attention,
            "BACKENDS",
            {"CPU_ATTN": f"{cuda_attention.__name__}.TreeAttentionBackend"},
        )
        for module in (attention, request_trees, cuda_warmup):
            patch.setattr(module, "platform_attention", lambda: cuda_attention)
        patch.setattr(launch, "device_limits", lambda device: limits._replace(num_sms=NUM_SMS))
        # read by vLLM's cache-writing kernel, for its tile size
        patch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
        yield
