"""The steps that vLLM runs as full CUDA graphs: its own sizes and dispatch, on the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, SchedulerConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker import cpu_worker  # noqa: F401  (fits V2's modules to the CPU first)
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_medusa.integration.attention.cuda_graphs import MAX_TOKENS, capture_more_trees

SEQS, TOKENS = 200, 8192


def finished(nodes: int, **chosen: Any) -> tuple[Any, VllmConfig]:
    """Arguments, and the graph settings of vLLM's config for them."""
    args = SimpleNamespace(
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        compilation_config=CompilationConfig(**chosen),
    )
    config = VllmConfig()  # whose platform, the CPU, has no graphs
    config.scheduler_config = SchedulerConfig(
        max_model_len=TOKENS, is_encoder_decoder=False, max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
    )  # fmt: skip
    config.model_config = SimpleNamespace(enforce_eager=False)
    config.compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **chosen
    )
    config.__class__ = type("Config", (VllmConfig,), {"uniform_decode_query_len": nodes})
    config._set_cudagraph_sizes()
    return args, config


def full_graphs(config: VllmConfig, nodes: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Requests with whole trees -> requests of the full graph that runs them."""
    first = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: first)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None)
    manager = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), config.compilation_config.cudagraph_mode, nodes
    )
    manager._graphs_captured = True
    served = {n: manager.dispatch(n, n * nodes, nodes, 0) for n in range(1, SEQS + 1)}
    return {n: d.num_reqs for n, d in served.items() if d.cg_mode == CUDAGraphMode.FULL}


@pytest.mark.parametrize(("nodes", "before"), [(64, 8), (23, 22), (16, 32), (2, SEQS)])
def test_batches(nodes, before, monkeypatch):
    args, config = finished(nodes)
    vllms = list(config.compilation_config.cudagraph_capture_sizes)
    assert max(full_graphs(config, nodes, monkeypatch)) == before
    capture_more_trees(args, config, nodes)
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert {*vllms} <= {*sizes} and sizes == sorted(sizes)
    assert len(sizes) <= len(vllms) + 40
    served = full_graphs(config, nodes, monkeypatch)
    maximum = min(SEQS, MAX_TOKENS // nodes)
    assert {*range(1, maximum + 1)} <= {*served}
    assert all(padded - n <= n / 8 for n, padded in served.items())
    capture_more_trees(args, config, nodes)
    assert config.compilation_config.cudagraph_capture_sizes == sizes


@pytest.mark.parametrize(
    "chosen", [{"max_cudagraph_capture_size": 128}, {"cudagraph_capture_sizes": [64, 256]}]
)
def test_the_users_sizes_are_kept(chosen):
    args, config = finished(64, **chosen)
    before = list(config.compilation_config.cudagraph_capture_sizes)
    capture_more_trees(args, config, 64)
    assert config.compilation_config.cudagraph_capture_sizes == before
    for name, value in chosen.items():  # passed as a separate argument
        args, config = finished(64)
        setattr(args, name, value)
        before = list(config.compilation_config.cudagraph_capture_sizes)
        capture_more_trees(args, config, 64)
        assert config.compilation_config.cudagraph_capture_sizes == before


def test_disabled_graphs_stay_disabled():
    args, config = finished(64)
    config.compilation_config.cudagraph_capture_sizes = []
    capture_more_trees(args, config, 64)
    assert config.compilation_config.cudagraph_capture_sizes == []
