"""Tree attention for the platform that vLLM runs on."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def platform_attention() -> Any:
    """The platform's module; a new platform needs a module with the same names.

    ``REPLACES`` is the member of `AttentionBackendEnum` that `TreeAttentionBackend` replaces. While
    the metadata of a step with trees is built, the attribute ``step`` of its builder is the
    `TreeStep`, else None. `compact_group` moves accepted paths in the KV cache. `warm_up`, on
    platforms that compile kernels, compiles them before the first request.
    """
    if current_platform.is_cuda():
        from vllm_medusa.integration import cuda_attention

        return cuda_attention
    from vllm_medusa.integration import cpu_attention

    return cpu_attention


def install_attention() -> None:
    """Register tree attention in place of vLLM's, for engines built later."""
    module = platform_attention()
    path = f"{module.__name__}.{module.TreeAttentionBackend.__name__}"
    register_backend(AttentionBackendEnum[module.REPLACES], path)
    forget_attention_backends()


def forget_attention_backends() -> None:
    """Clear vLLM's cache of chosen backends, filled by earlier engines in this process."""
    selector._cached_get_attn_backend.cache_clear()
