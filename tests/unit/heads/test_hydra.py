"""Hydra heads: the module, packed heads and files against the definition."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file
from support.hydra import dense_logits, random_hydra

from vllm_medusa.heads.checkpoint import load_heads, peek_heads, save_heads
from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.inspection import inspect_heads
from vllm_medusa.heads.model import HeadsError

HIDDEN, VOCAB, K = 16, 50, 3


def make(**changes):
    return random_hydra(K, 3, HIDDEN, VOCAB, **changes)


def shared():
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, VOCAB, HIDDEN, generator=generator).unbind()  # embedding, LM head


MAP = torch.tensor([7, 0, 49, 12, 30])


@pytest.mark.parametrize("token_map", [None, MAP])
@pytest.mark.parametrize("own", [False, True])
def test_every_head_equals_the_definition(own, token_map):
    heads, (embedding, lm_head) = make(own=own, token_map=token_map), shared()
    heads.use_target_embedding(embedding)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    path = torch.randint(0, VOCAB, (5, K), generator=torch.Generator().manual_seed(2))
    logits = heads.compute_logits(heads(states, K, path), lambda x: x @ lm_head.T)
    stored = deepcopy(heads)
    if token_map is not None and not own:
        stored.store_lm_head(lm_head[token_map])
    packed = PackedHydra(stored, lambda w, b: lambda x: torch.nn.functional.linear(x, w, b))
    for row, head in [(row, head) for row in range(5) for head in range(K)]:
        tokens = path[row, : head + 1].tolist()
        expected = dense_logits(heads, states[row], tokens, embedding, lm_head)
        torch.testing.assert_close(logits[row, head], expected, rtol=1e-4, atol=1e-4)
        seen = torch.cat([states[row], embedding[tokens].flatten()])[None]
        for form in (heads, stored, packed):
            x = form.level(head, seen).unsqueeze(1)
            one = form.compute_logits(x, lambda x: x @ lm_head.T, head)
            torch.testing.assert_close(one[0, 0], expected, rtol=1e-4, atol=1e-4)


def test_untrained_heads_predict_what_the_target_predicts():
    heads, (embedding, lm_head) = HydraHeads(K, 2, HIDDEN, VOCAB, num_lm_heads=0), shared()
    heads.use_target_embedding(embedding)
    states = torch.randn(2, HIDDEN)
    logits = heads.compute_logits(
        heads(states, K, torch.zeros(2, K).long()), lambda x: x @ lm_head.T
    )
    torch.testing.assert_close(logits, (states @ lm_head.T)[:, None].expand(-1, K, -1))


@pytest.mark.parametrize("token_map", [None, MAP])
@pytest.mark.parametrize("own", [False, True])
def test_saving_keeps_every_bit(tmp_path, own, token_map):
    heads = make(own=own, token_map=token_map)
    save_heads(tmp_path, heads, {"tree": [[0], [0, 0]], "base_model_name_or_path": "x"})
    info = peek_heads(tmp_path)
    assert (info.format, info.is_hydra, info.num_heads, info.num_layers) == ("hydra", True, K, 3)
    assert info.num_lm_heads == (K if own else 0) and info.vocab_size == VOCAB
    assert info.tree == [[0], [0, 0]] and info.base_model == "x"
    assert info.token_map == (token_map is not None)
    assert info.draft_vocab_size == (VOCAB if token_map is None else len(MAP))
    loaded, _ = load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert isinstance(loaded, HydraHeads)
    before = heads.state_dict()
    assert dict.fromkeys(before, True) == {
        name: torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items()
    }
    fewer, _ = load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB, max_heads=2)
    assert fewer.num_heads == 2 and torch.equal(fewer.inputs[1].weight, heads.inputs[1].weight)


def reference(tmp_path, **changes):
    """In the reference's format: a pickle with prefixed names."""
    tmp_path.mkdir(exist_ok=True)
    save_heads(tmp_path / "own", make(own=True))
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    tensors = {f"hydra_head.{name}": tensor for name, tensor in tensors.items()} | changes
    folder = tmp_path / "reference"
    folder.mkdir()
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    torch.save(kept, folder / "hydra_lm_head.pt")
    return folder


def test_the_references_file_is_read(tmp_path):
    loaded, info = load_heads(reference(tmp_path), hidden_size=HIDDEN, vocab_size=VOCAB)
    assert info.format == "hydra"
    assert torch.equal(loaded.lm_head_weight, make(own=True).lm_head_weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hydra_head.hydra_mlp.1.0.linear.weight": None}, r"lacks '.*mlp.1.0.linear.weight'"),
        ({"hydra_head.hydra_mlp.0.0.res_connection.weight": None}, "do not read tokens"),
        ({"hydra_head.prefix_embeding_layer.norm.weight": torch.ones(4)}, "prefix attention"),
        ({"hydra_head.hydra_mlp.0.odd": torch.ones(4)}, "unexpected"),
        ({"hydra_head.hydra_mlp.2.0.linear.weight": torch.ones(HIDDEN, 5)}, "has shape"),
        ({"hydra_head.hydra_lm_head.0.bias": torch.full((VOCAB,), torch.nan)}, "NaN"),
        ({"hydra_head.token_map": torch.arange(VOCAB) * 1.0}, "is float32; it must be one of int"),
        ({"model.norm.weight": torch.ones(4)}, "unexpected 'model.norm.weight'"),
    ],
)
def test_unsupported_files_are_named(tmp_path, change, reason):
    with pytest.raises(HeadsError, match=reason):
        load_heads(reference(tmp_path, **change), hidden_size=HIDDEN, vocab_size=VOCAB)


def test_inspection_reads_every_value(tmp_path):
    found = inspect_heads(reference(tmp_path))
    assert found.info.is_hydra and not found.damage
    assert found.to_dict()["parameters"] == sum(p.numel() for p in make(own=True).parameters())
    nan = {"hydra_head.hydra_mlp.1.0.res_connection.bias": torch.full((HIDDEN,), torch.nan)}
    damaged = inspect_heads(reference(tmp_path / "damaged", **nan)).damage
    assert len(damaged) == 1 and "hydra_mlp.1.0.res_connection.bias" in damaged[0]
    save_heads(tmp_path / "mapped", make(token_map=MAP), {})
    mapped = inspect_heads(tmp_path / "mapped")
    assert not mapped.damage
    assert mapped.to_dict()["parameters"] == sum(p.numel() for p in make().parameters())
