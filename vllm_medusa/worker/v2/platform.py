"""Tree attention by platform; add new platforms here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.platforms import current_platform

from vllm_medusa.config import MedusaConfigError

# (layers by name, names of one KV cache group, slot of each node int64 [B, N], then of a `Path`:
# nodes int64 [B, D + 1], num_accepted int64 [B])
Compact = Callable[[Mapping[str, Any], list[str], Tensor, Tensor, Tensor], None]
# (layers by name, vLLM's attention groups): before the first request, with the KV cache allocated
WarmUp = Callable[[Mapping[str, Any], Iterable[Any]], None]


@dataclass(frozen=True)
class TreeBackend:
    """A platform: its attention backend, and how KV is moved in its cache layout.

    The backend's metadata builder has an attribute ``step``: `TreeModelState` sets it to the
    `TreeStep` while the metadata of a step with trees is built, otherwise to None.
    """

    name: str  # member of vLLM's AttentionBackendEnum under which it is registered
    path: str  # of the backend class
    compact: Compact
    warm_up: WarmUp | None = None  # None: nothing is compiled


def tree_backend() -> TreeBackend:
    """The backend of vLLM's current platform.

    Raises:
        MedusaConfigError: There is none.

    """
    if current_platform.is_cpu():
        from vllm_medusa.worker.cpu_attention import compact_group

        return TreeBackend(
            "CPU_ATTN", "vllm_medusa.worker.cpu_attention.TreeAttentionBackend", compact_group
        )
    if current_platform.is_cuda():
        from vllm_medusa.worker import cuda_attention

        return TreeBackend(
            "TRITON_ATTN",
            "vllm_medusa.worker.cuda_attention.TreeAttentionBackend",
            cuda_attention.compact_group,
            cuda_attention.warm_up,
        )
    raise MedusaConfigError(
        f"Medusa has no tree attention for {current_platform.device_name!r} yet. Run on CPU or "
        "CUDA, or omit method='medusa'."
    )
