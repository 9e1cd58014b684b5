"""The benchmarks `kernels` and `step`: their results are checked before timing; interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.interpreter import INTERPRETING, run_interpreting

from benchmarks import kernels, step
from benchmarks.gpu.clock import HostClock
from benchmarks.kernels import KernelsOptions, Memory, Spec
from benchmarks.step import StepOptions
from vllm_medusa.job import SILENT

TINY = Spec("tiny", 4, 2, batch=2, context=40, nodes=5, head_size=16)
RATES = {"copy_bytes_per_s": 4e9, "matmul_flop_per_s": 8e11}


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process that interprets Triton, see below")
class TestInterpreted:
    @pytest.mark.parametrize("chunk", [0, 40])
    def test_attention_is_checked_and_timed(self, chunk):
        spec = replace(TINY, chunk=chunk)
        row = kernels.measure({"name": "a"}, spec, Memory("cpu"), HostClock(), RATES).to_dict()
        assert row["relative_error"] < 2 * kernels.RELATIVE and row["ours_us"] > 0
        assert ("flash_us" in row) == (not chunk)

    def test_a_wrong_result_is_not_timed(self, monkeypatch):
        """Negative control: only the last row of the output is wrong."""

        def off(query, keys, values, batch, scale, *, out):
            right(query, keys, values, batch, scale, out=out)
            out[-1] += 1

        right = kernels.paged_tree_attention
        monkeypatch.setattr(kernels, "paged_tree_attention", off)
        row = kernels.measure({"name": "a"}, TINY, Memory("cpu"), HostClock(), RATES).to_dict()
        assert "relative error" in row["failed"] and "ours_us" not in row

    def test_other_tiles_are_launched_and_planned_for(self):
        from vllm_medusa.scorer import launch

        with kernels.other_tiles(2, 7):
            made = launch.tile_sizes(16, 16, 4, 4, launch.DeviceLimits())
            row = kernels.measure({"name": "a"}, TINY, Memory("cpu"), HostClock(), RATES).to_dict()
        assert (made.num_stages, made.per_sm) == (2, 7) and row["ours_us"] > 0
        assert launch.tile_sizes(16, 16, 4, 4, launch.DeviceLimits()).num_stages == 3

    def test_steps_are_compared_with_plain_ones(self):
        options = StepOptions(models=("tiny",), batches=(2,), contexts=(20,), nodes=(7,))
        plain, tree = (row.to_dict() for row in step.run(options, SILENT))
        assert (plain["nodes"], tree["nodes"]) == (1, 7) and "ratio" not in plain
        assert tree["ratio"] == pytest.approx(tree["step_us"] / plain["step_us"])


@pytest.mark.skipif(INTERPRETING, reason="this is the process that interprets Triton")
def test_in_a_process_that_interprets():
    pytest.importorskip("triton")
    run_interpreting(__file__, "TestInterpreted")


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETING, reason="only without a GPU")
@pytest.mark.parametrize(("case", "options"), [(kernels, KernelsOptions()), (step, StepOptions())])
def test_without_a_gpu_there_is_a_reason(case, options):
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="torch finds no CUDA GPU"):
        next(case.run(options, SILENT))


def test_bytes_and_operations():
    spec = Spec("Llama-2-7B", 32, 32, 1, 4096, 64)
    assert spec.kv_bytes == 4160 * 32 * 128 * 2 * 2
    assert spec.flop == 4 * 64 * 32 * 4160 * 128
    assert 2 * replace(spec, cache=torch.float8_e4m3fn).kv_bytes == spec.kv_bytes
    mixed = replace(spec, chunk=2048)
    assert mixed.kv_bytes == (4160 + 2048) * 32 * 128 * 2 * 2
    assert mixed.flop - spec.flop == 4 * 2048**2 // 2 * 32 * 128


def test_memory_is_random_and_not_shared():
    memory = Memory("cpu")
    with pytest.raises(ValueError, match="GB of cache"):
        memory.take(2, memory.limit, torch.bfloat16)
    a, b = memory.take(2, 1000, torch.bfloat16)
    assert len(a) == 1000 and a.isfinite().all() and a.std() > 0.5
    assert b.data_ptr() - a.data_ptr() == 2000
    (c,) = memory.take(1, 3000, torch.float8_e4m3fn)
    assert c.float().isfinite().all() and c.float().max() > 1
