import pytest
import torch
from support.attention import gather_tokens

from vllm_medusa.kv.packed import PackedCaches
from vllm_medusa.scorer.layout import CacheLayout

SLOTS = torch.tensor([[20, 21, 22, 23, 24, 25], [99, 98, 97, 96, 0, 0], [50, 51, 52, 53, 54, 55]])
NODES = torch.tensor([[0, 2, 5], [0, 3, 3], [0, 0, 0]])
ACCEPTED = torch.tensor([2, 1, 0])


def numbered(start: int = 0) -> torch.Tensor:
    return (start + torch.arange(4.0 * 2 * 32 * 64)).view(4, 2, 32, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_all_layers_are_moved_once(isa, dtype):
    """A cache shared by two layers, and one of another shape; 22 -> 21, 25 -> 22, 96 -> 98."""
    caches = [numbered(), numbered(7), numbered(9).view(4, 1, 32, 128)]
    caches = [(cache % 2039).to(dtype) for cache in caches]
    expected = torch.arange(4 * 32)
    expected[[21, 22, 98]] = torch.tensor([22, 25, 96])
    before = [gather_tokens(cache, isa, expected) for cache in caches]
    given = [(cache, CacheLayout.of(cache, isa)) for cache in (*caches, caches[0])]
    PackedCaches(given).compact(SLOTS, NODES, ACCEPTED)
    for cache, tokens in zip(caches, before, strict=True):
        for found, wanted in zip(
            gather_tokens(cache, isa, torch.arange(4 * 32)), tokens, strict=True
        ):
            assert torch.equal(found, wanted)
