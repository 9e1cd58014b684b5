"""Tree attention for the platform that vLLM runs on."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def platform_attention() -> Any:
    """The platform's module; a new platform needs a module with the same names.

    ``BACKENDS`` maps members of `AttentionBackendEnum` to the classes that replace them. While the
    metadata of a step with trees is built, the attribute ``step`` of their builders is the
    `TreeStep`, else None. `compact_group` moves accepted paths in the KV cache. `warm_up`, on
    platforms that compile kernels, compiles them before the first request.
    """
    if current_platform.is_cuda():
        from vllm_medusa.integration.attention import cuda_attention

        return cuda_attention
    from vllm_medusa.integration.attention import cpu_attention

    return cpu_attention


def install_attention() -> None:
    """Register tree attention in place of vLLM's, for engines built later."""
    for name, path in platform_attention().BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
    forget_attention_backends()


def forget_attention_backends() -> None:
    """Clear vLLM's cache of chosen backends, filled by earlier engines in this process."""
    selector._cached_get_attn_backend.cache_clear()
