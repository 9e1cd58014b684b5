"""Dispatch of paged attention: Triton if available, else torch."""

from __future__ import annotations

from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.scorer.paged import PagedBatch, check_arguments
from vllm_medusa.scorer.paged_torch import paged_tree_attention_torch


def paged_tree_attention(
    query: Tensor,  # [T, Hq, D]
    key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    batch: PagedBatch,
    scale: float,
    *,
    out: Tensor,  # [T, Hq, D]
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,  # [Hq]
    k_scale: Tensor | None = None,  # fp32, one element
    v_scale: Tensor | None = None,  # fp32, one element
) -> Tensor:
    """Attend every row to its visible keys; keys and values are in the cache.

    On a GPU, or with Triton's interpreter, this launches the kernel: it allocates nothing and never
    waits for the device. Otherwise it runs `paged_torch`, for tests.

    Args:
        query: fp16, bf16 or fp32, rows and heads may be strided, channels must be contiguous.
        key_cache: Any strides, the dtype of the queries or fp8; vLLM's uint8 caches must be
            viewed as their fp8 dtype. e4m3 needs a GPU of capability 8.9.
        value_cache: Like ``key_cache``.
        batch: The requests.
        scale: Factor on the logits.
        out: Like ``query``. Rows outside all requests are unchanged.
        softcap: Logits become softcap * tanh(logits / softcap); 0 for none.
        window: Position p attends to positions > p - window; None for all.
        sinks: An additional logit per head, without a value.
        k_scale: Factor that dequantizes fp8 keys; None for 1.
        v_scale: Factor that dequantizes fp8 values; None for 1.

    Returns:
        ``out``.

    Raises:
        ImportError: Triton is missing on a GPU.

    """
    check_arguments(query, key_cache, value_cache, batch, out, window, sinks)
    if uses_kernel(query.device.type):
        from vllm_medusa.scorer.launch import paged_tree_attention_kernel as run
    else:
        run = paged_tree_attention_torch
    return run(
        query,
        key_cache,
        value_cache,
        batch,
        scale,
        out=out,
        softcap=softcap,
        window=window,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
