"""Supported platforms, workers and attention backends, and errors for others."""

import runpy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration import compat
from vllm_medusa.integration.startup.options import V2_WORKER, choose_triton_attention


def platform(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = SimpleNamespace(
        is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda", device_name=name
    )
    monkeypatch.setattr("vllm.platforms.current_platform", found)


class TestPlatforms:
    @pytest.mark.parametrize(("name", "on_v2"), [("cpu", False), ("cpu", True), ("cuda", True)])
    def test_accepted(self, monkeypatch, name, on_v2):
        platform(monkeypatch, name)
        compat.refuse_unsupported_platform(on_v2)
        assert compat.on_cuda() == (name == "cuda")

    @pytest.mark.parametrize(
        ("name", "on_v2", "reason"),
        [
            ("cuda", False, "V2 model runner.*VLLM_USE_V2_MODEL_RUNNER"),
            ("rocm", True, "CPU and CUDA.*'rocm'"),
        ],
    )
    def test_refused(self, monkeypatch, name, on_v2, reason):
        platform(monkeypatch, name)
        with pytest.raises(MedusaConfigError, match=reason):
            compat.refuse_unsupported_platform(on_v2)

    def test_the_worker_of_v2(self, monkeypatch):
        from vllm.v1.worker.cpu_worker import CPUWorker
        from vllm.v1.worker.gpu_worker import Worker

        for name, on_cpu in (("cpu", True), ("cuda", False)):
            platform(monkeypatch, name)
            ours = runpy.run_module(V2_WORKER.rpartition(".")[0])["MedusaWorker"]
            assert issubclass(ours, Worker) and issubclass(ours, CPUWorker) == on_cpu


class TestChoice:
    def chosen(self, **arguments: Any) -> Any:
        args = EngineArgs(".", **arguments)  # a folder, so that no name is looked up
        choose_triton_attention(args)
        choose_triton_attention(args)  # arguments may be used for several engines
        return args.attention_backend or args.attention_config.backend

    def test_triton(self):
        backends = ("auto", "triton_attn", AttentionBackendEnum.TRITON_ATTN)
        for arguments in (
            {},
            *({"attention_backend": backend} for backend in backends),
            {"attention_config": {"backend": "TRITON_ATTN"}},
        ):
            chosen = self.chosen(**arguments)
            assert str(getattr(chosen, "name", chosen)).upper() == "TRITON_ATTN"

    def test_others_are_refused(self):
        for arguments in (
            {"attention_backend": "FLASH_ATTN"},
            {"attention_backend": AttentionBackendEnum.FLASHINFER},
            {"attention_config": {"backend": "flex_attention"}},
            {"attention_config": {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}},
        ):
            with pytest.raises(MedusaConfigError, match=r"FLA?.*TRITON_ATTN|FLEX.*TRITON_ATTN"):
                self.chosen(**arguments)
