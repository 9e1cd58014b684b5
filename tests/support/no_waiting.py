"""Detects host syncs in steps of the V2 runner."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    """Raises on reads of device values."""

    ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype != torch.bool for index in indices), "index of unknown size"
        assert not name.startswith(self.ASKS), f"{name} waits for the device"
        return func(*args, **kwargs or {})


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Watch every part of a step for syncs; returns the number of calls, by name."""

    from vllm_medusa.integration.request_trees import RequestTrees
    from vllm_medusa.integration.v2.sampler import TreeSampler
    from vllm_medusa.integration.v2.speculator import TreeSpeculator

    calls: dict[str, int] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            with NoWaiting():
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(RequestTrees, "begin")
    watch(RequestTrees, "write_positions")
    watch(TreeSampler, "__call__")
    watch(TreeSpeculator, "propose")
    return calls
