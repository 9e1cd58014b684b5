"""The benchmarks `kernels` and `step`: their results are checked before timing; interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.interpreter import IN_INTERPRETER, INTERPRETING

from benchmarks import kernels, step
from benchmarks.gpu.clock import HostClock
from benchmarks.kernels import KernelsOptions, Memory, Spec
from benchmarks.step import StepOptions
from vllm_medusa.job import SILENT

TINY = Spec("tiny", 4, 2, batch=2, context=40, nodes=5, head_size=16)
RATES = {"copy_bytes_per_s": 4e9, "matmul_flop_per_s": 8e11}


@IN_INTERPRETER
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
        assert tree["lookup_us"] > 0 and "lookup_us" not in plain
        assert tree["ratio"] == pytest.approx(tree["step_us"] / plain["step_us"])


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETING, reason="only without a GPU")
@pytest.mark.parametrize(("case", "options"), [(kernels, KernelsOptions()), (step, StepOptions())])
def test_without_a_gpu_there_is_a_reason(case, options):
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="torch finds no CUDA GPU"):
        next(case.run(options, SILENT))
