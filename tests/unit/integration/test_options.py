"""Heads of another target: one warning, where the options are resolved."""

import logging
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from support.random_heads import HIDDEN, VOCAB, random_heads, write

from vllm_medusa.config import MedusaConfig
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


def test_a_warning_for_another_target_and_info_if_not_comparable(heads, target, said):
    update_config(heads, target=target_fingerprint(target))
    write(target / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 8)})
    ((level, message),) = said(heads, target)
    assert level == "WARNING"
    assert all(x in message for x in ("was made for another target", heads, str(target)))
    quantized = TARGET | {"quantization_config": {"quant_method": "awq"}}
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 8).int()}
    write(target / "model.safetensors", packed, quantized)
    ((level, message),) = said(heads, target)
    assert (level, "quantized by awq" in message) == ("INFO", True)


def test_start_up_limits_the_time_of_a_comparison(heads, target, said, monkeypatch):
    """Weights on a slow disk: reading stops, and the engine starts."""
    update_config(heads, target=target_fingerprint(target))
    names = [f"model.layers.{layer}.weight" for layer in range(50)]
    write(target / "model.safetensors", {name: torch.ones(4, 8) for name in names}, TARGET)
    from vllm_medusa.heads import fingerprint

    original, read = fingerprint._runs, []

    def slow(*arguments):
        time.sleep(0.02)
        read.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(fingerprint, "_runs", slow)
    monkeypatch.setattr(options, "_SECONDS_TO_COMPARE", 0.1)
    ((level, message),) = said(heads, target)
    assert len(read) < 10  # of fifty reads
    assert (level, "took longer than 0.1 s" in message) == ("INFO", True)
