"""Equality with plain vLLM for different kinds of attention and positions.

Each model is tiny, random and chaotic; drafts are planted, so every step accepts and moves KV, and
without the moves the outputs would differ. Head sizes are those of vLLM's CPU attention (>= 32).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, random_prompts, worker_of
from support.models import VOCAB, save_model, save_random_heads
from support.planted import planted
from support.reference import assert_chaotic, differing, plain_greedy
from support.runner import on_v1, sized
from support.spies import assert_reported, mean_accepted, recorded_steps
from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_medusa.integration.attention import cpu_attention

pytestmark = pytest.mark.engine

TOKENS = sized(36, 24)
TREE = {"dense": [3, 2, 2, 1]}  # 33 draft nodes, depth 4
WINDOW = 24  # shorter than most prompts
TINY_WINDOW = 5  # a leaf sees itself, its four ancestors and no context


@dataclass(frozen=True)
class Model:
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    hidden: int = 64
    kv_groups: int = 1


def amplify(gemma: Any) -> None:
    """Make the layers outweigh the embedding, which Gemma scales up, or it repeats its input."""
    for layer in gemma.model.layers:
        layer.post_attention_layernorm.weight.fill_(9.0)
        layer.post_feedforward_layernorm.weight.fill_(9.0)


MODELS = {
    "llama_tied": Model("Llama", {"tie_word_embeddings": True}),
    "qwen2": Model("Qwen2", {"hidden_size": 128, "head_dim": None}, hidden=128),  # biases
    "qwen3": Model("Qwen3"),  # norms on queries and keys
    "mistral_window": Model("Mistral", {"sliding_window": WINDOW}),
    "mistral_tiny_window": Model("Mistral", {"sliding_window": TINY_WINDOW}),
    "gemma2": Model(  # soft caps on attention and logits; every other layer has a sliding window
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "num_hidden_layers": 4,
         "attn_logit_softcapping": 20.0, "tie_word_embeddings": True, "tune": amplify},
        kv_groups=2,
    ),
    "gemma3": Model(  # two RoPEs; one global layer after two sliding-window layers
        "Gemma3",
        {"config_name": "Gemma3TextConfig", "sliding_window": TINY_WINDOW, "num_hidden_layers": 3,
         "query_pre_attn_scalar": 2, "tie_word_embeddings": True, "tune": amplify,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        kv_groups=3,
    ),
    "gpt2": Model(  # learned positions
        "GPT2",
        {"model_name": "GPT2LMHeadModel", "hidden_size": 128, "num_key_value_heads": None,
         "tie_word_embeddings": True},
        hidden=128,
    ),
    "opt": Model(  # learned positions with an offset
        "OPT",
        {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "init_std": 0.3,
         "num_key_value_heads": None, "tie_word_embeddings": True},
        hidden=128,
    ),
    "falcon": Model(  # one key head, attention and MLP in parallel
        "Falcon",
        {"hidden_size": 128, "num_key_value_heads": None, "multi_query": True, "alibi": False,
         "head_dim": None, "new_decoder_architecture": False, "parallel_attn": True},
        hidden=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sized(list(MODELS), ["gemma3", "gpt2"]))
def test_equality(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    path = save_model(tmp_path / "model", model.architecture, **model.changes)
    heads = save_random_heads(tmp_path / "heads", hidden=model.hidden)
    assert_equal(path, heads, monkeypatch, model.kv_groups)


def assert_equal(
    path: str, heads: str, monkeypatch: pytest.MonkeyPatch, groups: int = 1, shortest: int = 2
) -> None:
    prompts = random_prompts(sized(12, 3), VOCAB, shortest=shortest, longest=150, seed=3)
    options = {"max_model_len": 256, "max_num_batched_tokens": 2048}
    with on_v1(), engine(path, **options) as llm:
        reference = plain_greedy(llm, prompts, TOKENS)
    assert len(reference.prompts) >= sized(9, 2)
    assert_chaotic(reference.outputs, distinct=0.3)  # Gemma prefers some tokens, but does not loop
    with (
        engine(path, medusa(heads, TREE), **options) as llm,
        planted(reference.prompts, reference.outputs, VOCAB) as moves,
    ):
        with recorded_steps() as steps:
            got = complete(llm, reference.prompts, greedy(TOKENS))
        monkeypatch.setattr(cpu_attention, "compact_group", lambda *args: None)
        unmoved = complete(llm, reference.prompts, greedy(TOKENS))
        assert len(worker_of(llm).model_runner.kv_cache_config.kv_cache_groups) == groups
    assert differing(reference.completions, got) == []
    assert_reported(steps, reference.prompts, got)
    assert sum(moves) > sized(0.7, 0.5) * len(moves) and mean_accepted(steps) > sized(1.5, 1.0)
    assert len(differing(reference.completions, unmoved)) > 0.6 * len(reference.prompts)


def test_multi_dimensional_rope(
    tmp_path: Path, random_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama with M-RoPE, as if tokens 1 to 4 of every prompt were a 2 x 2 image.

    vLLM's own M-RoPE models need torchvision, which has no CPU build here.
    """

    def positions(self: Any, tokens: list[int], features: Any) -> tuple[torch.Tensor, int]:
        image = torch.tensor([[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2]])
        rest = torch.arange(3, len(tokens) - 2).expand(3, -1)
        return torch.cat([torch.zeros(3, 1, dtype=torch.int64), image, rest], 1), -2

    llama = LlamaForCausalLM
    monkeypatch.setattr(llama, "supports_mrope", True, raising=False)
    monkeypatch.setattr(llama, "get_mrope_input_positions", positions, raising=False)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    path = save_model(tmp_path / "model", "Llama", rope_parameters=rope)
    assert_equal(path, random_heads, monkeypatch, shortest=6)


def test_alibi_is_refused(tmp_path: Path) -> None:
    path = save_model(
        tmp_path / "model", "Bloom", hidden_size=128, n_layer=2, n_head=4, num_key_value_heads=None
    )
    heads = save_random_heads(tmp_path / "heads", hidden=128)
    with pytest.raises(NotImplementedError, match="ALiBi"):  # noqa: SIM117
        with engine(path, medusa(heads, TREE), max_model_len=128):
            pass
