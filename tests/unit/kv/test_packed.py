import pytest
import torch

from vllm_medusa.kv.packed import compact_packed
from vllm_medusa.scorer.layout import CacheLayout, gather_tokens

SLOTS = torch.tensor([[20, 21, 22, 23, 24, 25], [99, 98, 97, 96, 0, 0], [50, 51, 52, 53, 54, 55]])
NODES = torch.tensor([[0, 2, 5], [0, 3, 3], [0, 0, 0]])
ACCEPTED = torch.tensor([2, 1, 0])


def numbered(start: int = 0) -> torch.Tensor:
    return (start + torch.arange(4.0 * 2 * 32 * 64)).view(4, 2, 32, 64)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_all_layers_are_moved_once(isa):
    """A cache shared by two layers, and one of another shape; 22 -> 21, 25 -> 22, 96 -> 98."""
    caches = [numbered(), numbered(7), numbered(9).view(4, 1, 32, 128)]
    expected = torch.arange(4 * 32)
    expected[[21, 22, 98]] = torch.tensor([22, 25, 96])
    before = [gather_tokens(cache, isa, expected) for cache in caches]
    given = [(cache, CacheLayout.of(cache, isa)) for cache in (*caches, caches[0])]
    compact_packed(given, SLOTS, NODES, ACCEPTED)
    for cache, tokens in zip(caches, before, strict=True):
        for found, wanted in zip(
            gather_tokens(cache, isa, torch.arange(4 * 32)), tokens, strict=True
        ):
            assert torch.equal(found, wanted)


def test_caches_are_not_accessed_if_no_token_moves():
    def never():
        raise AssertionError
        yield

    compact_packed(never(), SLOTS, NODES[2:].expand(3, -1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AssertionError):  # negative control
        compact_packed(never(), SLOTS, NODES, ACCEPTED)
