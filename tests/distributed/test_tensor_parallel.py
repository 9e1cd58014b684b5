"""Two tensor-parallel ranks, `mp` executor: plain vLLM's tokens, and identical decisions.

After a step is scheduled nothing is broadcast between ranks: each verifies, compacts its part
of the KV cache and drafts on its own. So all decisions of all ranks are compared, and three
negative controls let one rank differ to show that the comparison detects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.assets import HEADS, TARGET, code_prompts
from support.budgets import fickle, policy_of
from support.eagle_runs import TOKENS as LEARNED_TOKENS
from support.eagle_runs import Case, eagle_config
from support.engines import complete, engine, greedy, medusa, random_prompts
from support.fitted_case import TOKENS as HYDRA_TOKENS
from support.fitted_case import TREES, Fitted
from support.mla import save_deepseek
from support.models import VOCAB, save_random_heads
from support.mtp import GLM, random_case
from support.plain import (
    COMMON,
    TOKENS,
    Plain,
    Run,
    assert_same_decisions,
    run,
    run_greedy,
    run_seeded,
)
from support.ranks import WORKER, request_key
from support.reference import assert_chaotic, differing, plain_greedy
from support.runner import ON_V2, sized
from vllm import LLM, SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

DEPTH = sized(3, 2)
TREE = {"dense": [2] * DEPTH}
NODES = 2 ** (DEPTH + 1) - 1
KINDS = sized(["greedy", "seeded", "unseeded", "unplanted"], ["greedy", "seeded"])
FEW = [7, 70, 170, 270, 370, 470]  # allowed tokens of unseeded requests, so that drafts match


def run_unseeded(llm: LLM, plain: Plain, count: int | None = None) -> Run:
    return run(llm, plain.prompts[:count], SamplingParams(allowed_token_ids=FEW, **COMMON))


@pytest.fixture(scope="module")
def one_rank(plain: Plain, chaotic_llama: str, random_heads: str) -> dict[str, Run]:
    with engine(chaotic_llama, medusa(random_heads, TREE), worker_cls=WORKER) as llm:
        return {"greedy": run_greedy(llm, plain), "seeded": run_seeded(llm, plain)}


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    if not ON_V2:  # only one engine can exist at a time
        request.getfixturevalue("one_rank")
    config = medusa(random_heads, TREE)
    with engine(chaotic_llama, config, worker_cls=WORKER, tensor_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def two_ranks(llm: LLM, plain: Plain) -> dict[str, Run]:
    runs = {"greedy": run_greedy(llm, plain), "seeded": run_seeded(llm, plain)}
    if "unseeded" in KINDS:
        runs["unseeded"] = run_unseeded(llm, plain)
        runs["unplanted"] = run(llm, plain.greedy.prompts[:32], greedy(TOKENS))
    return runs


def test_the_reference_is_meaningful(plain: Plain) -> None:
    assert len(plain.greedy.prompts) >= 85
    assert_chaotic(plain.greedy.outputs)
    assert sum(not outcome.steady for outcome in plain.seeded) <= 10


def test_each_rank_scores_its_half(llm: LLM) -> None:
    assert llm.collective_rpc("imported_before_fork") == [True, True]
    assert llm.collective_rpc("shard") == [[0, 256], [256, 256]]


@pytest.mark.parametrize("kind", sized(["greedy", "unplanted"], ["greedy"]))
def test_greedy_tokens(two_ranks: dict[str, Run], plain: Plain, kind: str) -> None:
    got = two_ranks[kind].completions
    assert differing(plain.greedy.completions[: len(got)], got) == []


def test_seeded_tokens(two_ranks: dict[str, Run], plain: Plain) -> None:
    assert plain.unlike_seeded(two_ranks["seeded"].completions) == []


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_one_rank_decides_the_same(
    one_rank: dict[str, Run], two_ranks: dict[str, Run], plain: Plain, kind: str
) -> None:
    """Accepted paths and the shape of every step, not only tokens; drafts except near-ties."""
    assert_same_decisions(one_rank[kind], two_ranks[kind], plain.unsteady)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_agree(two_ranks: dict[str, Run], kind: str) -> None:
    """Every accepted path, every output token and every next draft of every step."""
    result = two_ranks[kind]
    assert len(result.ranks) == 2 and len(result.ranks[0]) == len(result.ranks[1])
    assert result.differing() == 0


def test_the_comparison_covers_many_verdicts(two_ranks: dict[str, Run]) -> None:
    trees = {kind: result.trees for kind, result in two_ranks.items()}
    print({kind: len(made) for kind, made in trees.items()})
    assert min(len(trees["greedy"]), len(trees["seeded"])) > sized(1000, 15)
    assert sum(map(len, trees.values())) > sized(5000, 35)
    for kind in KINDS[:3]:
        lengths = [len(made.nodes) - 1 for made in trees[kind]]
        assert sum(lengths) > 0.4 * len(lengths) and max(lengths) == DEPTH
    assert max(made.num_nodes for made in trees["greedy"]) == NODES


@pytest.mark.parametrize(
    ("kind", "disturbance"),
    [("greedy", "logits"), ("seeded", "draws"), ("unseeded", "shared_draws")],
)
def test_a_differing_rank_is_detected(
    llm: LLM, two_ranks: object, plain: Plain, kind: str, disturbance: str
) -> None:
    """On V1; the comparison is the same on V2."""
    runs = {"greedy": run_greedy, "seeded": run_seeded, "unseeded": run_unseeded}
    llm.collective_rpc("disturb", args=(disturbance,))
    try:
        result = runs[kind](llm, plain, 24)
    finally:
        llm.collective_rpc("restore")
    assert result.differing() > 0.2 * len(result.ranks[0])


def test_dynamic_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scheduler decides for both ranks, which timed their steps together at start-up."""
    prompts = code_prompts(0, sized(12, 4))
    with engine(TARGET) as alone:
        expected = complete(alone, prompts, greedy(TOKENS))
    config = {"method": "medusa", "model": HEADS, "budget": "auto"}
    with engine(TARGET, config, worker_cls=WORKER, tensor_parallel_size=2) as llm:
        assert policy_of(llm).cost.steps > sized(20, 0)
        llm.collective_rpc("take_decisions")
        taken = fickle(monkeypatch, llm)
        got = run(llm, prompts, greedy(TOKENS))
    assert differing(expected, got.completions) == []
    assert got.differing() == 0 and len(got.ranks) == 2
    kinds = {made.num_nodes for made in got.trees}
    assert min(len(set(taken)), len(kinds)) > sized(10, 3)
    assert sum(len(made.nodes) > 1 for made in got.trees) > len(prompts)


def test_an_eagle_drafter(eagle_case: Case) -> None:
    """Its drafts come from gathered logits, like the target's verdicts."""
    case, count = eagle_case, sized(12, 4)
    tree = eagle_config(case, {"width": 3, "depth": 3}, budget=9)
    with engine(case.target, tree, worker_cls=WORKER, tensor_parallel_size=2) as llm:
        got = run(llm, case.prompts[:count], greedy(LEARNED_TOKENS))
    assert [list(each.token_ids) for each in got.completions] == case.outputs[:count]
    assert got.differing() == 0 and len(got.ranks) == 2
    accepted = [len(made.nodes) - 1 for made in got.trees]
    assert sum(accepted) > len(accepted) > 5 * count  # it has memorized them


def test_an_mtp_module(tmp_path: Path) -> None:
    """Each rank has half of its heads and experts; the first drafts are those of a dense pass."""
    case = random_case(tmp_path, GLM, count=4)
    texts = {
        request_key(prompt, None): (prompt, output)
        for prompt, output in zip(case.prompts, case.outputs, strict=True)
    }
    known = [(key, output) for key, (_, output) in texts.items()]
    config = {"method": "mtp", "tree": {"width": 3, "depth": 3}, "budget": 9}
    with engine(case.target, config, worker_cls=WORKER, tensor_parallel_size=2) as llm:
        got = run(llm, case.prompts, greedy(LEARNED_TOKENS), known)
    assert [list(each.token_ids) for each in got.completions] == case.outputs
    assert got.differing() == 0 and len(got.ranks) == 2
    accepted = [len(made.nodes) - 1 for made in got.trees]
    assert sum(accepted) > len(accepted) > 5 * len(texts)
    same = []
    for made in got.trees:
        if made.drafts:
            prompt, output = texts[made.request]
            tokens = torch.tensor([*prompt, *output[: made.position]])
            features = case.drafter.features(case.model, tokens[None, :-1])[0]
            logits, _ = case.drafter.dense(tokens[1:], features, [])
            same.append(made.drafts[0] == int(logits.argmax()))
    assert sum(same) > 0.95 * len(same) > 5 * len(texts)


def test_hydra_heads(fitted_case: Fitted) -> None:
    """Each rank embeds a part of the vocabulary and scores a part of the draft vocabulary."""
    case, kind = fitted_case, "dynamic hydra"
    tree = medusa(case.heads[kind], **TREES[kind][0])
    with engine(case.model, tree, worker_cls=WORKER, tensor_parallel_size=2) as llm:
        got = run(llm, case.prompts, greedy(HYDRA_TOKENS))
    for completion, result in zip(got.completions, case.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert list(completion.accepted) == result.accepted_per_step
    assert got.differing() == 0 and len(got.ranks) == 2
    assert len(got.trees) > len(case.prompts)


@pytest.mark.skipif(ON_V2, reason="trees over MLA need V1")
def test_latent_attention(tmp_path: Path) -> None:
    """Each rank has half of the heads and all latents, which it compacts itself."""
    target, heads = save_deepseek(tmp_path / "target"), save_random_heads(tmp_path / "heads")
    options = {"attention_backend": "CPU_MLA", "num_gpu_blocks_override": 70}
    prompts = random_prompts(24, VOCAB, longest=60, seed=43)
    with engine(target, **options) as alone:
        expected = plain_greedy(alone, prompts, TOKENS)
    pairs = zip(expected.prompts, expected.outputs, strict=True)
    known = [(request_key(prompt, None), list(output)) for prompt, output in pairs]
    tree = medusa(heads, TREE)
    with engine(target, tree, worker_cls=WORKER, tensor_parallel_size=2, **options) as llm:
        got = run(llm, expected.prompts, greedy(TOKENS), known)
    assert len(known) > 15 and expected.gaps(got.completions) == []
    assert got.differing() == 0 and len(got.ranks) == 2
    accepted = [len(made.nodes) - 1 for made in got.trees]
    assert sum(accepted) > len(accepted) > 5 * len(known)
