"""Checks that depend on the installed vLLM."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.logger import init_logger

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.heads.cpu import Linear

logger = init_logger("vllm.medusa")  # a child of vLLM's logger, to use its handlers


def refuse_unsupported_platform(on_v2: bool) -> None:
    """Check for tree attention: on vLLM's CPU platform, and on CUDA with the V2 runner."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise MedusaConfigError(
            "Medusa trees run on vLLM's CPU and CUDA platforms; this is "
            f"{current_platform.device_name!r}. Omit method='medusa'."
        )
    if not on_v2:
        raise MedusaConfigError(
            "On CUDA, Medusa trees run on vLLM's V2 model runner, but this configuration uses V1. "
            "Unset VLLM_USE_V2_MODEL_RUNNER or set it to 1, and disable microbatching (enable_dbo)."
        )


def on_cuda() -> bool:
    """Whether vLLM runs on CUDA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def uses_v2_runner(parallel_config: Any) -> bool:
    """Whether vLLM will use its V2 model runner, by vLLM's own rule.

    vLLM decides this on the finished config, which does not exist yet when the speculative config
    is created. So its rule is repeated here, and `checks` compares the two answers later.

    Raises MedusaConfigError: it was requested but can't run; vLLM's own error has less information.
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    requested: bool | None = envs.VLLM_USE_V2_MODEL_RUNNER
    if requested and not HAS_TRITON:
        raise MedusaConfigError(
            "VLLM_USE_V2_MODEL_RUNNER=1 requests vLLM's V2 model runner, which needs Triton, but "
            "vLLM found no usable Triton here. Unset it to use the V1 runner, or install a "
            "Triton with a backend for this device."
        )
    if requested is not None:
        return requested
    return HAS_TRITON and not parallel_config.use_ubatching


def derives_from(worker_cls: Any, base: str) -> bool:
    """Whether a worker class, given by name or as a class, is ``base`` or derives from it."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    try:
        found = resolve_obj_by_qualname(worker_cls) if isinstance(worker_cls, str) else worker_cls
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, resolve_obj_by_qualname(base))


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The matmul of vLLM's CPU layers (oneDNN, weight [O, I] packed once), or torch's.

    As in vLLM, torch's is used if oneDNN does not support it: bf16 and fp16 without AVX-512.
    """
    from vllm import _custom_ops as ops

    try:
        handler = ops.create_onednn_mm(weight.t(), 32)
    except (AttributeError, RuntimeError):  # built without oneDNN; no primitive for this CPU
        return functools.partial(F.linear, weight=weight, bias=bias)
    return lambda x: ops.onednn_mm(handler, x, bias)
