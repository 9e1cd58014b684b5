"""Newer layouts of EAGLE drafters: exact entries and drafts, and plain vLLM's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle import Eagle3
from support.eagle_runs import (
    LAYERS,
    LONG,
    PARAMS,
    Case,
    drafting_every_fifth_step,
    eagle_config,
    run,
)
from support.engines import complete, engine, metric, worker_of
from support.models import VOCAB
from support.planted import planted
from support.reference import differing
from support.runner import sized
from support.spies import mean_accepted, recorded_steps
from torch import nn
from vllm import LLM

from vllm_medusa.heads.eagle_tensors import Layout
from vllm_medusa.heads.files import find_checkpoint
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees

pytestmark = pytest.mark.engine

WINDOW, BLOCK = 64, 32
Patch = pytest.MonkeyPatch


def with_window(drafter: Eagle3) -> None:
    """And with scaled positions, which other cases do not have."""
    drafter.window, drafter.rope_factor = WINDOW, 4.0


def as_of_speculators(drafter: Eagle3) -> None:
    """Their current defaults for Llama: norms before ``fc``, normed states in the next step."""
    drafter.add_norms()
    drafter.norm_before_residual = True


def parts(llm: LLM) -> tuple[Any, Any]:
    """The drafter and its attention layer."""
    runner = worker_of(llm).model_runner
    drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator.drafter
    ((name,),) = (group.layer_names for group in drafter.draft_attn_groups)
    return drafter, drafter.vllm_config.compilation_config.static_forward_context[name]


def parameters(llm: LLM) -> set[str]:
    """The names of vLLM's parameters in checkpoints."""
    names = {name.removeprefix("model.") for name, _ in parts(llm)[0].model.named_parameters()}
    for joined, apart in (("qkv_proj", ("q", "k", "v")), ("gate_up_proj", ("gate", "up"))):
        for name in {name for name in names if joined in name}:
            names = names - {name} | {name.replace(joined, f"{part}_proj") for part in apart}
    return {name.replace("draft_id_to_target_id", "d2t") for name in names}


def norms_left_out(patch: Patch, llm: LLM) -> None:
    drafter, _ = parts(llm)
    patch.setattr(drafter.model.model, "fc_norm", None)
    patch.setattr(drafter, "kernel", None)


def window_ignored(patch: Patch, llm: LLM) -> None:
    """The drafter attends to what is left of its cache before the window."""
    drafter, layer = parts(llm)
    wrong = -1 if isinstance(layer.impl.sliding_window, int) else (-1, -1)
    patch.setattr(layer.impl, "sliding_window", wrong)
    patch.setattr(drafter, "kernel", None)


def earlier_states(patch: Patch, llm: LLM) -> None:
    """It reads the states of the token before."""
    prefill = EagleTrees.prefill

    def wrong(self: Any, paths: Any, **kwargs: bool) -> Any:
        tokens = replace(paths.tokens, features=paths.tokens.features.roll(1, 0))
        return prefill(self, replace(paths, tokens=tokens), **kwargs)

    patch.setattr(EagleTrees, "prefill", wrong)
    patch.setattr(EagleTrees, "prefill_on_host", lambda *_: None)


def query_norm_left_out(patch: Patch, llm: LLM) -> None:
    drafter, _ = parts(llm)
    norm = drafter.model.model.layers[0].self_attn.q_norm
    patch.setattr(norm, "weight", nn.Parameter(torch.ones_like(norm.weight)))


def masks_without_state(patch: Patch, llm: LLM) -> None:
    drafter, _ = parts(llm)
    token, state = drafter.mask
    patch.setattr(drafter, "mask", (token, torch.zeros_like(state)))


CASES: dict[str, tuple[Callable[[Eagle3], None], Callable[[Patch, LLM], None]]] = {
    "EAGLE-3.1": (as_of_speculators, norms_left_out),
    "window": (with_window, window_ignored),
    "last_state": (Eagle3.read_last, earlier_states),
    "Qwen3": (Eagle3.like_qwen3, query_norm_left_out),
    "P-EAGLE": (Eagle3.draft_in_parallel, masks_without_state),
}


@pytest.fixture(scope="module")
def plain(eagle_case: Case) -> Any:
    with engine(eagle_case.target) as llm:
        return complete(llm, LONG, PARAMS)


def in_speculators_folder(folder: Path) -> None:
    """Rewrite a config as speculators writes its default, a layer of Qwen3."""
    layer = json.loads((folder / "config.json").read_text())
    apart = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {name: layer.pop(name) for name in apart} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "owner/target", "architectures": []},
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def case(request: Any, eagle_case: Case, tmp_path: Path) -> Case:
    """A random drafter of a layout; EAGLE-3.1's and Qwen3's folders are those of speculators."""
    torch.manual_seed(4)
    embedding = eagle_case.model.get_input_embeddings().weight
    drafter = Eagle3(embedding, torch.arange(1, VOCAB, 2), LAYERS)
    CASES[request.param][0](drafter)
    folder = drafter.save(tmp_path / "drafter")
    if request.param == "EAGLE-3.1":
        from support.commands import convert

        convert(folder, "speculators", tmp_path / "speculators")
        folder = str(tmp_path / "speculators")
        assert "speculators_config" in json.loads(Path(folder, "config.json").read_text())
    elif request.param == "Qwen3":
        in_speculators_folder(Path(folder))
    return replace(eagle_case, drafter=drafter, folder=folder)


@pytest.mark.parametrize(
    ("case", "name"), [(name, name) for name in CASES], indirect=["case"], ids=CASES
)
def test_exact(case: Case, plain: Any, monkeypatch: Patch, name: str) -> None:
    """Chunked prefill, prefixes in the cache, few blocks left for drafts."""
    tree = eagle_config(case, {"width": 3, "depth": 4}, budget=12)
    groups = 5 if case.drafter.window else 1  # of layers, which share the blocks
    with engine(
        case.target,
        tree,
        block_size=BLOCK,
        num_gpu_blocks_override=sized(120, 100) if groups > 1 else sized(56, 20),
        max_model_len=512,
        max_num_batched_tokens=96,
        enable_prefix_caching=True,
    ) as llm:
        tensors = Layout.read(find_checkpoint(case.folder)).tensors()
        assert parameters(llm) == {*tensors} - {"t2d", "mask_hidden"}
        some = slice(sized(8, 3))
        assert run(case, llm, plain, every=2, some=some) > 20
        assert metric(llm, "prefix_cache_hits") > 0
        assert (parts(llm)[1].sliding_window or None) == case.drafter.window
        prompts, outputs = LONG[some], [list(c.token_ids) for c in plain[some]]
        with planted(prompts, outputs, VOCAB), recorded_steps() as steps:  # with the kernel
            assert differing(plain[some], complete(llm, prompts, PARAMS[some])) == []
        assert mean_accepted(steps) > 1
        if groups > 1:  # pending entries in blocks that the target's layers get
            outputs = [list(completion.token_ids) for completion in plain]
            with monkeypatch.context() as patch, planted(LONG, outputs, VOCAB):
                waited = drafting_every_fifth_step(patch)
                assert differing(plain, complete(llm, LONG, PARAMS)) == []
            assert max(waited) > 2
        with monkeypatch.context() as patch:
            CASES[name][1](patch, llm)
            with pytest.raises(AssertionError, match=r"not (close|equal)"):
                run(case, llm, plain, every=2, some=slice(2))


@pytest.mark.parametrize("case", ["EAGLE-3.1", "window", "P-EAGLE"], indirect=True)
def test_chains_are_exact(case: Case, plain: Any) -> None:
    """A chain's levels use vLLM's own attention.

    vLLM's own chain is no reference for random drafters: on CPUs 0.32 drafts what they would draft
    if a drafted token did not attend to itself.
    """
    chain = eagle_config(case, "chain", num_speculative_tokens=4)
    with engine(case.target, chain, block_size=BLOCK) as llm:
        assert run(case, llm, plain, every=1, some=slice(3)) > 20
