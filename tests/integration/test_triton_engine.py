"""The CUDA attention in a whole engine: vLLM's V2 runner with the interpreter.

Cache layout, cache writes and steps without trees are those of vLLM's Triton backend; output
is compared with plain vLLM on its own C++ attention. Runs in `tests/v2/test_on_v2.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, metric, random_prompts, worker_of
from support.models import VOCAB, save_model
from support.planted import planted, random_topologies
from support.reference import Reference, assert_chaotic, plain_greedy
from support.runner import ON_V2, on_v1
from support.spies import mean_accepted, mixed
from vllm import LLM

if ON_V2:
    from support.triton_attention import triton_attention_on_cpu
    from support.triton_on_cpu import rules_in_triton

from vllm_medusa.integration.attention import cuda_attention, cuda_metadata
from vllm_medusa.scorer.paged import PagedBatch
from vllm_medusa.tree.batch import TreeBatch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_on_v2.py"),
]

TOKENS = 24
FEW = 12  # long enough for errors to show
SHARED = 16  # output tokens with which another prompt starts
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]]
LONGEST = 50  # with `SHARED` more, this fills two blocks
SMALL: dict[str, Any] = {
    "max_model_len": LONGEST + TOKENS,
    "max_num_batched_tokens": 36,
    "max_num_seqs": 4,
    "block_size": 32,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 4 << 20,
}


@dataclass
class Attended:
    """Recorded arguments of our kernel."""

    batches: list[PagedBatch]
    windows: set[int | None]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Attended:
    seen = Attended([], set())
    attend = cuda_attention.paged_tree_attention

    def spy(
        query: Any, keys: Any, values: Any, batch: PagedBatch, *args: Any, **kwargs: Any
    ) -> Any:
        flags = batch.is_tree.clone(), batch.cu_query_lens.clone()
        seen.batches.append(replace(batch, is_tree=flags[0], cu_query_lens=flags[1]))
        seen.windows.add(kwargs["window"])
        return attend(query, keys, values, batch, *args, **kwargs)

    monkeypatch.setattr(cuda_attention, "paged_tree_attention", spy)
    return seen


def causal_mask(patch: pytest.MonkeyPatch) -> None:
    """Every node attends to all nodes before it."""
    attend = cuda_attention.paged_tree_attention

    def paged_tree_attention(*args: Any, **kwargs: Any) -> Any:
        query, keys, values, batch, scale = args
        batch = replace(batch, is_tree=torch.zeros_like(batch.is_tree))
        return attend(query, keys, values, batch, scale, **kwargs)

    patch.setattr(cuda_attention, "paged_tree_attention", paged_tree_attention)


def no_compaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_attention, "compact_group", lambda *args: None)


Setting = tuple[str, Reference]  # a model, and plain vLLM's output


def check_warm_up(worker: Any) -> None:
    """Warm-up calls the kernel with batches without rows, split or not; eager engines skip it."""
    warmed: list[PagedBatch] = []
    with pytest.MonkeyPatch.context() as patch:
        attend = cuda_attention.paged_tree_attention

        def spy(*args: Any, **kwargs: Any) -> Any:
            warmed.append(args[3])
            return attend(*args, **kwargs)

        patch.setattr(cuda_attention, "paged_tree_attention", spy)
        patch.setattr(worker.vllm_config.kernel_config, "enable_jit_warmup", True)
        worker.compile_or_warm_up_model()
    assert {batch.num_splits > 1 for batch in warmed} == {False, True}
    assert not any(batch.cu_query_lens.any() for batch in warmed)


class Cases:
    architecture: str
    window: int | None = None
    trees: ClassVar[dict[str, Any]]
    lengths: tuple[int, ...]  # prompt lengths

    @pytest.fixture(scope="class")
    def setting(self, tmp_path_factory: pytest.TempPathFactory) -> Setting:
        changes = {"sliding_window": self.window} if self.window else {}
        model = save_model(tmp_path_factory.mktemp("model"), self.architecture, **changes)
        prompts = [
            prompt
            for seed, length in enumerate(self.lengths)
            for prompt in random_prompts(1, VOCAB, length, length, seed)
        ]
        with on_v1(), engine(model, **SMALL) as llm:
            reference = plain_greedy(llm, prompts, TOKENS)
        assert reference.dropped <= 1
        assert_chaotic(reference.outputs)
        return model, reference

    @pytest.fixture(scope="class")
    def llm(self, setting: Setting, random_heads: str) -> Iterator[LLM]:
        with (
            rules_in_triton(),
            triton_attention_on_cpu(),
            engine(setting[0], medusa(random_heads, **self.trees), **SMALL) as llm,
        ):
            check_warm_up(worker_of(llm))
            yield llm


class TestLlama(Cases):
    architecture = "Llama"
    trees: ClassVar = {"tree": TREE}
    lengths = (LONGEST, LONGEST, LONGEST, 40, 30)  # some grow to max_model_len

    def test_same_tokens(self, llm: LLM, setting: Setting, attended: Attended) -> None:
        _, steps, _ = setting[1].planted_on(llm)
        assert mean_accepted(steps) > 1.0
        assert attended.windows == {None}
        assert {batch.num_splits > 1 for batch in attended.batches} == {False, True}
        assert mixed(steps), "no step mixed trees with prefill"
        assert any(
            any(row.is_tree for row in step)
            and any(row.num_nodes == 1 and not row.is_prefill for row in step)
            for step in steps
        ), "no step mixed trees with plain decodes"  # near max_model_len nothing is drafted

    def test_cached_prefixes(self, llm: LLM, setting: Setting, attended: Attended) -> None:
        """Blocks with compacted nodes are reused by the next request with the same tokens."""
        _, reference = setting
        prompt, output = reference.prompts[0], list(reference.outputs[0])
        before = metric(llm, "prefix_cache_hits")
        longer = [prompt + output[:SHARED]]
        with planted(longer, [output[SHARED:]], VOCAB):
            (got,) = complete(llm, longer, greedy(TOKENS - SHARED))
        assert list(got.token_ids) == output[SHARED:]
        hits = metric(llm, "prefix_cache_hits") - before
        assert hits > len(prompt)
        assert attended.batches

    @pytest.mark.parametrize("control", [causal_mask, no_compaction])
    def test_each_control_differs(
        self,
        llm: LLM,
        setting: Setting,
        monkeypatch: pytest.MonkeyPatch,
        control: Callable[[pytest.MonkeyPatch], None],
    ) -> None:
        part = setting[1].part(2, 2)
        control(monkeypatch)
        with planted(part.prompts, part.outputs, VOCAB):
            got = complete(llm, part.prompts, greedy(FEW))
        expected = [output[:FEW] for output in part.outputs]
        assert any(a != b.token_ids for a, b in zip(expected, got, strict=True))


class TestMistral(Cases):
    """With a budget every request and step has its own tree, whose depths determine the window."""

    architecture = "Mistral"
    window = 24
    trees: ClassVar = {"budget": len(TREE)}
    lengths = (45, 30)

    def test_same_tokens(
        self, llm: LLM, setting: Setting, attended: Attended, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        random_topologies(monkeypatch)
        depths = set()
        write = cuda_metadata._Trees.write

        def spy(trees: Any, tree: TreeBatch) -> None:
            write(trees, tree)
            depths.update(map(tuple, trees.buffers.depths[: tree.batch_size].tolist()))

        monkeypatch.setattr(cuda_metadata._Trees, "write", spy)
        _, steps, _ = setting[1].planted_on(llm)
        assert mean_accepted(steps) > 0.5 and len(depths) > 10
        assert attended.windows == {self.window}
