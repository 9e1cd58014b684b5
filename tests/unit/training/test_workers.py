"""The processes of a run wait for each other as long as it takes."""

from datetime import timedelta
from types import SimpleNamespace

import accelerate
import torch

from vllm_medusa.training.workers import Workers


def test_waiting_for_a_merge_of_hours_is_no_error(monkeypatch):
    asked = {}

    def state(**options):
        asked.update(options)
        return SimpleNamespace(process_index=0, num_processes=2, device=torch.device("cpu", 0))

    monkeypatch.setattr(accelerate, "PartialState", state)
    workers = Workers("cpu")
    assert workers.main and workers.device == torch.device("cpu")
    assert asked["cpu"] and asked["timeout"] >= timedelta(days=1)
