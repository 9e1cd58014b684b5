"""Loading a target whose checkpoint holds Medusa heads as well (a full Medusa-2 model)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_medusa.heads.formats import is_head_tensor


@contextmanager
def heads_left_out() -> Iterator[None]:
    """Within the block vLLM's loader passes the heads' tensors over."""
    original = DefaultModelLoader.get_all_weights

    def get_all_weights(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in original(self, *args, **kwargs):
            if not is_head_tensor(name):
                yield name, tensor

    DefaultModelLoader.get_all_weights = get_all_weights
    try:
        yield
    finally:
        DefaultModelLoader.get_all_weights = original
