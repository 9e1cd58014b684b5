from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# Ranks share the cores of one NUMA node here; otherwise vLLM binds each to a separate node.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="session", autouse=True)
def _one_import_for_all_ranks() -> Iterator[None]:
    """Ranks started by this process are forked from one that has imported vLLM.

    On CPUs, vLLM spawns them, and each import takes eleven seconds; `test_executors` covers that.
    """
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.rank_imports"])  # ranks check its success

    def get_mp_context() -> Any:
        tests = str(Path(__file__).parents[1])
        path = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            forkserver.ensure_running()
        return context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", get_mp_context)
        yield


@pytest.fixture(scope="session")
def plain(chaotic_llama: str) -> Any:
    from support.plain import plain_vllm

    return plain_vllm(chaotic_llama)


@pytest.fixture(scope="session")
def own_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four random heads with their own LM heads."""
    from support.models import save_random_heads

    return save_random_heads(tmp_path_factory.mktemp("own_heads"), std=0.1, num_lm_heads=4)


@pytest.fixture(scope="session")
def mapped_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four random heads that score 300 scattered tokens with the target's LM head."""
    import torch
    from support.models import VOCAB, save_random_heads

    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:300]
    folder = tmp_path_factory.mktemp("mapped_heads")
    return save_random_heads(folder, std=0.1, token_map=some)
