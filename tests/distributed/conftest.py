from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Ranks share the cores of one NUMA node here; vLLM binds each to a node of its own otherwise.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="session")
def plain(chaotic_llama: str) -> Any:
    from support.plain import plain_vllm

    return plain_vllm(chaotic_llama)


@pytest.fixture(scope="session")
def own_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four random heads with LM heads of their own."""
    import torch
    from support.models import HIDDEN, VOCAB

    from vllm_medusa.heads import MedusaHeads, save_heads

    folder: Path = tmp_path_factory.mktemp("own_heads")
    torch.manual_seed(3)
    heads = MedusaHeads(4, 1, HIDDEN, VOCAB)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.1)
    save_heads(folder, heads)
    return str(folder)
