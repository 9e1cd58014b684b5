"""MTP modules with trees: exact KV, chains equal to vLLM's, and plain vLLM's tokens."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from support import assets, mla
from support.eagle_runs import (
    LONG,
    PARAMS,
    TOKENS,
    Case,
    assert_chain_of_vllm,
    exact_after_plain_steps,
    exact_in_mixed_steps,
    mixed_steps,
    run,
)
from support.engines import complete, engine, greedy, start
from support.mtp import (
    DEEPSEEK,
    KINDS,
    MIMO,
    Kind,
    make_case,
    random_case,
    save_random,
)
from support.runner import sized
from support.spies import mean_accepted, recorded_steps
from vllm import LLM
from vllm.model_executor.models.mimo_mtp import MiMoMultiTokenPredictorLayer

from vllm_medusa.integration.drafters.eagle_trees import EagleTrees

pytestmark = pytest.mark.engine

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("mtp"))


def test_chain_is_that_of_vllm(case: Case) -> None:
    assert_chain_of_vllm(case, {"method": "mtp"}, {"method": "mtp", "tree": "chain"})


BACKEND = {"attention_backend": "CPU_MLA"}  # for MLA
WHOLE_PROMPTS: dict[str, Any] = {  # it has neither chunked prefill nor a prefix cache
    "block_size": 16,
    "num_gpu_blocks_override": 70,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
}
OTHERS = [kind for kind in KINDS.values() if kind is not MIMO]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.architecture)
def test_other_modules(kind: Kind, tmp_path: Path, monkeypatch: Patch) -> None:
    """Random modules: exact entries and drafts, and plain vLLM's tokens, greedy and seeded.

    GLM's norms its states before the LM head; DeepSeek's passes normed ones to its next step.
    """

    def window_ignored(patch: Patch) -> None:
        """The dense module attends to everything."""
        patch.setattr(case.drafter, "kind", replace(kind, window=None))

    case, latent = random_case(tmp_path, kind), kind.tune is mla.soften
    with engine(case.target, **BACKEND if latent else {}) as llm:
        plain = complete(llm, LONG, PARAMS)
    tree = {"method": "mtp", "tree": {"width": 3, "depth": 4}, "budget": 12}
    with mixed_steps(case, tree, **BACKEND | WHOLE_PROMPTS if latent else {}) as llm:
        exact_in_mixed_steps(case, llm, plain, cached=not latent)
        if not latent:  # latents are always computed with attention
            with monkeypatch.context() as patch:
                exact_after_plain_steps(case, llm, plain, patch)
        windowed = [window_ignored] if kind.window else []
        for breaks in (positions_of_slots, siblings_seen, *windowed):
            with monkeypatch.context() as patch:
                breaks(patch)
                with pytest.raises(AssertionError, match="not close"):
                    run(case, llm, plain, every=4, some=slice(3))


def test_chain_of_a_module_with_two_states(tmp_path: Path) -> None:
    """DeepSeek's; its random drafts are rejected, so future tokens are planted."""
    case = random_case(tmp_path, DEEPSEEK, count=4)
    stock, chain = {"method": "mtp", **BACKEND}, {"method": "mtp", "tree": "chain"}
    assert_chain_of_vllm(case, stock, chain, plant=True, **BACKEND)


def test_the_example(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture) -> None:
    """With a small engine in this process."""
    target = save_random(tmp_path, MIMO, vocab_size=assets.VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(assets.TARGET) / name, tmp_path)
    own = {"max_model_len": 256, "skip_tokenizer_init": False}
    monkeypatch.setattr(vllm, "LLM", lambda **given: start(**given | own))
    example = str(Path(__file__).parents[2] / "examples" / "mtp.py")
    monkeypatch.setattr(sys, "argv", [example, target])
    runpy.run_path(example, run_name="__main__")
    said = capsys.readouterr().out
    assert "def read_settings" in said and re.search(r"accepted in \d+ steps with drafts\n$", said)


@pytest.fixture(scope="module")
def plain(case: Case) -> Any:
    with engine(case.target) as llm:
        return complete(llm, LONG, PARAMS)


@pytest.fixture(scope="module")
def llm(case: Case, plain: Any) -> Iterator[LLM]:
    tree = {"method": "mtp", "tree": {"width": 3, "depth": 4}, "budget": 12}
    with mixed_steps(case, tree) as llm:
        yield llm


def test_exact_in_mixed_steps(case: Case, llm: LLM, plain: Any) -> None:
    exact_in_mixed_steps(case, llm, plain)


def test_exact_after_plain_steps(case: Case, llm: LLM, plain: Any, monkeypatch: Patch) -> None:
    """Entries are then computed by vLLM's module, without attention."""
    exact_after_plain_steps(case, llm, plain, monkeypatch)


def norm_left_out(patch: Patch) -> None:
    """The target's hidden states are not normed."""
    forward = MiMoMultiTokenPredictorLayer.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.hidden_layernorm.forward = lambda states: states
        try:
            return forward(self, *args, **kwargs)
        finally:
            del self.hidden_layernorm.forward

    patch.setattr(MiMoMultiTokenPredictorLayer, "forward", wrong)


def positions_of_slots(patch: Patch) -> None:
    """Siblings have the positions of their slots, not of their depth."""
    forward = EagleTrees._forward

    def wrong(self: Any, common: Any, ids: Any, positions: Any, *args: Any, **named: Any) -> Any:
        if len(args) > 1:  # branches
            positions = positions + torch.arange(common.max_query_len).repeat(common.num_reqs)
        return forward(self, common, ids, positions, *args, **named)

    patch.setattr(EagleTrees, "_forward", wrong)


def siblings_seen(patch: Patch) -> None:
    """A branch attends to all expanded nodes."""
    forward = EagleTrees._forward

    def wrong(self: Any, *args: Any, **named: Any) -> Any:
        *given, branches = args
        if isinstance(branches, tuple):
            args = *given, (torch.ones_like(branches[0]), *branches[1:])
        return forward(self, *args, **named)

    patch.setattr(EagleTrees, "_forward", wrong)


@pytest.mark.parametrize("breaks", [norm_left_out, positions_of_slots, siblings_seen])
def test_negative_controls(
    case: Case, llm: LLM, plain: Any, monkeypatch: Patch, breaks: Callable[[Patch], None]
) -> None:
    """Tokens are correct for any output of the module, but its states are wrong."""
    breaks(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        run(case, llm, plain, every=4, some=slice(sized(3, 1)))


def test_acceptance_depends_on_the_norm(case: Case, llm: LLM, monkeypatch: Patch) -> None:
    """The module predicts these outputs; without a norm its drafts are rejected."""
    accepted = []
    for breaks in (False, True):
        if breaks:
            norm_left_out(monkeypatch)
        with recorded_steps() as steps:
            got = complete(llm, case.prompts, greedy(TOKENS))
        assert [list(completion.token_ids) for completion in got] == case.outputs
        accepted.append(mean_accepted(steps))
    right, wrong = accepted
    assert right > 2 > 4 * wrong
