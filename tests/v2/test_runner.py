"""Specific to vLLM's V2 runner: its selection, its extension points and its limits.

Runs in `test_on_v2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.assets import HEADS, TARGET
from support.budgets import policy_of
from support.engines import complete, engine, greedy, medusa, metric, worker_of
from support.metrics import counts, drafted_and_accepted
from support.models import VOCAB, save_config
from support.no_waiting import NoWaiting, watched
from support.outcomes import (
    Outcome,
    assert_same,
    assert_same_with_trees,
    by_seed,
    one_of_each,
    outcomes,
)
from support.planted import planted, planted_by_seed
from support.reference import Reference, differing, plain_greedy
from support.runner import ON_V2, async_scheduling, on_v1
from support.spies import mean_accepted, recorded_steps, tree_rows
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_on_v2.py"),
]

if ON_V2:
    from support.triton_on_cpu import rules_in_triton
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from vllm_medusa.config import AcceptanceConfig
    from vllm_medusa.integration.attention.cuda_graphs import tree_sizes
    from vllm_medusa.integration.requests import RequestOptions
    from vllm_medusa.integration.startup.options import (
        V1_WORKER,
        V2_WORKER,
        TreeSpeculativeConfig,
        has_trees,
    )
    from vllm_medusa.integration.v2 import sampler as sampler_module
    from vllm_medusa.integration.v2.kernel import persistent_draws
    from vllm_medusa.integration.v2.sampler import TreeSampler

TREE = [[0], [1], [0, 0], [1, 0], [1, 0, 0]]
BLOCK = 32


@pytest.fixture(scope="module")
def target_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config(tmp_path_factory.mktemp("target"))


@pytest.fixture
def configure(target_config: str, random_heads: str) -> Callable[..., Any]:
    def configured(**changes: Any) -> Any:
        options = {"skip_tokenizer_init": True, "speculative_config": medusa(random_heads, TREE)}
        return EngineArgs(model=target_config, **options | changes).create_engine_config()

    return configured


@pytest.mark.parametrize(
    ("value", "on_v2"), [("1", True), (None, True), ("0", False)], ids=["value", "default", "not"]
)
def test_the_runner_is_vllm_s_choice(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, value: str | None, on_v2: bool
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    plain, trees = configure(speculative_config=None), configure()
    spec = trees.speculative_config
    assert plain.use_v2_model_runner == trees.use_v2_model_runner == on_v2
    assert isinstance(spec, TreeSpeculativeConfig) == on_v2
    assert trees.parallel_config.worker_cls == (V2_WORKER if on_v2 else V1_WORKER)
    assert has_trees(spec) and spec.num_speculative_tokens == len(TREE)


def test_nothing_is_reserved_for_a_draft_model(configure: Callable[..., Any]) -> None:
    config = configure()
    assert config.num_lookahead_tokens == 0
    assert config.speculative_config.max_num_new_slots_for_drafting == 0
    assert not config.speculative_config.use_eagle_block_drop()  # drops cached blocks


@pytest.mark.parametrize(
    ("trees", "lengths"), [({"tree": TREE}, {6}), ({"budget": 7}, {1, 8})], ids=["static", "budget"]
)
def test_full_graphs(
    configure: Callable[..., Any], random_heads: str, trees: dict[str, Any], lengths: set[int]
) -> None:
    """vLLM captures them for steps of whole trees; with a budget also for steps without drafts."""
    config = configure(
        speculative_config={"method": "medusa", "model": random_heads, **trees}, max_num_seqs=20
    )
    sizes = [1, 2, 4, 8, 16, 20, *tree_sizes(max(lengths), 20, 2048)]
    config.compilation_config.cudagraph_capture_sizes = sorted(set(sizes))
    config.compilation_config.max_cudagraph_capture_size = max(sizes)
    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.__dict__ |= {
        "vllm_config": config, "compilation_config": config.compilation_config,
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, "decode_query_len": max(lengths),
        "varlen_decode": False, "ubatch_runner": None, "lora_capture_cases": [0],
        "max_num_reqs": 20, "_candidates": {}, "_capture_descs": {},
    }  # fmt: skip
    manager._init_candidates()
    full = manager._capture_descs[CUDAGraphMode.FULL]
    assert {graph.uniform_token_count for graph in full} == lengths
    for length in lengths:
        counts = {g.num_reqs for g in full if g.uniform_token_count == length}
        assert counts >= {1, 2, 4, 8, 16, 20}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"enable_trace_replay": True}, "enable_trace_replay"),
        ({"logits_processors": ["a.b"]}, "logits processors"),
        ({"worker_cls": "vllm_medusa.integration.v1.worker.MedusaCPUWorker"}, "derive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_the_reason(
    configure: Callable[..., Any], changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        configure(**changes)


@pytest.fixture(scope="module")
def even(chaotic_llama: str) -> Reference:
    """Prompts of whole blocks and one token."""
    prompts = [[3 + (5 * i + n) % 500 for i in range(BLOCK * n + 1)] for n in (1, 2, 3)]
    with on_v1(), engine(chaotic_llama) as llm:
        return plain_greedy(llm, prompts, 12)


@pytest.fixture(scope="module")
def llm(even: object, plain_seeded: object, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    options = {"block_size": BLOCK, "enable_prefix_caching": True, "max_num_seqs": 8}
    with rules_in_triton(), engine(chaotic_llama, medusa(random_heads, TREE), **options) as llm:
        yield llm


def test_a_step_never_waits_for_the_device(
    llm: LLM, plain_seeded: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watched(monkeypatch)
    assert_same(plain_seeded, outcomes(llm, *one_of_each()))
    params = one_of_each()[1]
    for param in params:
        param.extra_args = {"medusa": {"acceptance": "typical", "greedy_root": True}}
    outcomes(llm, one_of_each()[0], params)
    assert min(calls.values()) > 5 and len(calls) == 4


def test_control_syncs_are_detected() -> None:
    for wait in (lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t[t > 0]):
        with pytest.raises(AssertionError), NoWaiting():
            wait(torch.ones(3))


def test_lossless_and_typical_together(llm: LLM, plain_seeded: list[Outcome]) -> None:
    """Each request of the batch twice: the lossless ones equal plain vLLM's."""
    prompts, params = one_of_each()
    typical = one_of_each()[1]
    for param in typical:
        param.extra_args = {"medusa": {"acceptance": "typical", "epsilon": 0.01}}
    with planted_by_seed(by_seed(plain_seeded), VOCAB), recorded_steps() as steps:
        got = outcomes(llm, prompts * 2, params + typical)
    assert_same(plain_seeded, got[: len(params)])
    assert max(map(len, steps)) == 2 * len(params)


def test_large_batches_are_verified_in_parts(
    llm: LLM, plain_seeded: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM limits the fp32 logits; a part consists of whole requests, at least one."""
    parts: list[int] = []
    decide = TreeSampler._decide

    def spy(self: Any, part: Any) -> Any:
        parts.append(len(part.slots))
        return decide(self, part)

    monkeypatch.setattr(TreeSampler, "_decide", spy)
    for limit in (1, 13):
        monkeypatch.setattr(sampler_module, "get_max_chunk_logits", lambda _, n=limit: n)
        assert_same_with_trees(llm, plain_seeded, *one_of_each())
    assert {1, 2} <= set(parts) and 4 not in parts


def test_prefills_padded_with_placeholders(llm: LLM, even: Reference) -> None:
    """All but one token of a prompt is cached: the scheduler adds placeholder drafts."""
    assert llm.reset_prefix_cache()
    for again in (False, True):
        with planted(even.prompts, even.outputs, VOCAB), recorded_steps() as steps:
            got = [complete(llm, [prompt], greedy(12))[0] for prompt in even.prompts]
        assert differing(even.completions, got) == []
        filled = [row for row in tree_rows(steps) if row.is_prefill]
        assert len(filled) == again * len(even.prompts)
        assert all(row.accepted == 0 for row in filled)
        assert mean_accepted(steps) > 0.8
    assert metric(llm, "prefix_cache_hits") > 0


def test_start_up_allocates_the_logits_of_all_nodes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise memory profiling would allocate one row of logits per request."""
    runner = worker_of(llm).model_runner
    rows: list[int] = []
    compute = runner.model.compute_logits

    def spy(hidden_states: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_states))
        return compute(hidden_states)

    monkeypatch.setattr(runner.model, "compute_logits", spy)
    runner.profile_run()
    assert max(rows) == 8 * (1 + len(TREE))


DYNAMIC = medusa(HEADS, budget=5)


def grammars() -> list[SamplingParams]:
    """Every second request has a grammar."""
    kinds = [StructuredOutputsParams(choice=["yes, of course", "no, never"]), None,
             StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}"), None]  # fmt: skip
    return [
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=kind) for kind in kinds
    ]


QUESTIONS = ["Is it so?", "The cat sat on", "On which day?", "Once upon a time"]


@pytest.fixture(scope="module")
def plain_texts() -> list[str]:
    with on_v1(), engine(TARGET, skip_tokenizer_init=False) as llm:
        results = llm.generate(QUESTIONS, grammars(), use_tqdm=False)
    return [result.outputs[0].text for result in results]


@pytest.mark.parametrize("trees", [medusa(HEADS, TREE), DYNAMIC], ids=["static", "dynamic"])
def test_structured_output_and_trees_together(
    plain_texts: list[str], trees: dict[str, Any]
) -> None:
    """Outputs follow their grammars and equal plain vLLM's; drafts of all requests are counted.

    The async scheduler then waits for each step's tokens.
    """
    with (
        async_scheduling(),
        engine(TARGET, trees, skip_tokenizer_init=False) as llm,
        recorded_steps() as steps,
    ):
        results = llm.generate(QUESTIONS, grammars(), use_tqdm=False)
        counted = counts(llm)
    assert [result.outputs[0].text for result in results] == plain_texts
    assert plain_texts[0] in ("yes, of course", "no, never")
    bound = {tuple(results[i].prompt_token_ids) for i in (0, 2)}
    rows = tree_rows(steps)
    drafted = [drafted_and_accepted(result.outputs[0])[0] for result in results]
    assert min(map(sum, drafted)) > 0
    assert counted["spec_decode_num_draft_tokens"] == sum(map(sum, drafted))
    for following in (False, True):
        assert sum(row.accepted for row in rows if (row.prompt in bound) == following) > 0


def test_a_request_with_a_grammar_arrives_while_no_head_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no drafts to look up in the last proposal, which was for a smaller batch."""
    from vllm_medusa.integration.startup import startup_timing

    monkeypatch.setattr(startup_timing, "SECONDS", 0.0)
    allowed = ["yes, of course", "no, never"]
    params = SamplingParams(
        temperature=0.0, max_tokens=5, structured_outputs=StructuredOutputsParams(choice=allowed)
    )
    with engine(TARGET, DYNAMIC | {"budget": "auto"}, skip_tokenizer_init=False) as llm:
        core, texts = llm.llm_engine, {}
        monkeypatch.setattr(policy_of(llm), "limit", lambda requests, *_: 5 * (requests == 1))
        core.add_request("first", "Is it so?", params)
        while not core.step():  # until it has a token
            pass
        for name in ("second", "third"):
            core.add_request(name, "Is it so?", params)
        while core.has_unfinished_requests():
            texts |= {output.request_id: output.outputs[0].text for output in core.step()}
    assert len(texts) == 3
    for text in texts.values():
        assert text and any(each.startswith(text) for each in allowed)


def test_noise_is_not_shared_where_another_sampler_may_draw() -> None:
    """Noise that is used only if drafts benefit from it would bias the tokens."""
    requests = RequestOptions(3, AcceptanceConfig(), 64, torch.device("cpu"))
    for slot, heat in enumerate((1.0, 0.5, 0.0)):
        requests.add(slot, SamplingParams(temperature=heat, max_tokens=8), 4)
    states = SimpleNamespace(seeds_set=np.array([True, False, True]))
    for fused, wide, expected in (
        (False, False, [1.0, 0.5, 0.0]),
        (True, False, [1.0, 0.0, 0.0]),
        (False, True, [0.0, 0.0, 0.0]),
    ):
        sampler = SimpleNamespace(
            use_fp64_gumbel=wide, use_flashinfer=fused, use_xpu_sampler=False,
            sampling_states=states,
        )  # fmt: skip
        assert persistent_draws(sampler, requests, np.arange(3)).tolist() == expected
