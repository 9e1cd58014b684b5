"""Heads of another target: one warning, where the options are resolved."""

import itertools
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from support.random_heads import HIDDEN, VOCAB, random_heads, write

from vllm_medusa.config import MedusaConfig
from vllm_medusa.heads import fingerprint
from vllm_medusa.heads.checkpoint import update_config
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.integration.startup import options
from vllm_medusa.integration.startup.options import resolve

TARGET = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1}


@pytest.fixture
def heads(tmp_path):
    write(tmp_path / "heads" / "model.safetensors", random_heads(3).spelled("vllm"), {})
    return str(tmp_path / "heads")


@pytest.fixture
def target(tmp_path):
    weights = {"model.layers.0.mlp.up_proj.weight": torch.ones(4, HIDDEN)}
    write(tmp_path / "target" / "model.safetensors", weights, TARGET)
    return tmp_path / "target"


@pytest.fixture
def said():
    """(level, message) of all log records while options are resolved."""
    records = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append
    shown = logging.getLogger("vllm")
    level = shown.level
    shown.addHandler(handler)
    shown.setLevel(logging.INFO)  # the tests use a higher level

    def resolved(heads, target):
        records.clear()
        model = SimpleNamespace(
            model=str(target), revision=None,
            get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB,
        )  # fmt: skip
        resolve(MedusaConfig(model=heads, tree=[[0]]), model)
        return [(record.levelname, record.getMessage()) for record in records]

    yield resolved
    shown.setLevel(level)
    shown.removeHandler(handler)


def test_no_message_without_a_fingerprint_or_for_the_same_target(heads, target, said):
    assert said(heads, target) == []
    update_config(heads, target=target_fingerprint(target))
    assert said(heads, target) == []


def test_a_warning_for_another_target(heads, target, said):
    update_config(heads, target=target_fingerprint(target))
    write(target / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 8)})
    ((level, message),) = said(heads, target)
    assert level == "WARNING"
    assert all(x in message for x in ("was made for another target", heads, str(target)))


def test_start_up_limits_the_time_of_a_comparison(heads, target, said, monkeypatch):
    """Weights on a slow disk, a second for each tensor: reading stops, and the engine starts."""
    update_config(heads, target=target_fingerprint(target))
    names = [f"model.layers.{layer}.weight" for layer in range(50)]
    write(target / "model.safetensors", {name: torch.ones(4, 8) for name in names}, TARGET)
    clock = itertools.count()
    monkeypatch.setattr(fingerprint, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(options, "_SECONDS_TO_COMPARE", 3)
    ((level, message),) = said(heads, target)
    assert next(clock) == 5  # after three of fifty tensors
    assert (level, "took longer than 3 s" in message) == ("INFO", True)
