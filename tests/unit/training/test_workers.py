"""The processes of a run wait for each other without a time limit."""

from datetime import timedelta
from types import SimpleNamespace

import accelerate
import pytest
import torch

from vllm_medusa.training.workers import Workers, usable


def test_a_merge_may_take_hours(monkeypatch):
    received = {}

    def state(**options):
        received.update(options)
        return SimpleNamespace(process_index=0, num_processes=2, device=torch.device("cpu", 0))

    monkeypatch.setattr(accelerate, "PartialState", state)
    workers = Workers("cpu")
    assert workers.main and workers.device == torch.device("cpu")
    assert received["cpu"] and received["timeout"] >= timedelta(days=1)


@pytest.mark.parametrize("device", ["zz", "cuda:x", "absent"])
def test_a_device_that_cannot_be_used_is_named(device):
    assert usable("cpu") == torch.device("cpu")
    if device == "absent":
        device = "xpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ValueError, match=rf"--device {device} can't be used here.*Use cpu"):
        usable(device)
