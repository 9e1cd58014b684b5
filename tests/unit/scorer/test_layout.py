"""The packing itself is checked against vLLM in tests/integration/test_cpu_layout.py."""

import pytest
import torch
from support.attention import element_offsets, flat, gather_tokens

from vllm_medusa.kv import copy_slots
from vllm_medusa.scorer.layout import SUPPORTED_ISAS, CacheLayout


def numbered_cache(isa: str, blocks: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(blocks * 2 * 32 * 64).to(dtype).view(blocks, 2, 32, 64)


@pytest.mark.parametrize("isa", SUPPORTED_ISAS)
def test_blocks_may_have_gaps(isa):
    cache = numbered_cache(isa)
    apart = torch.full((4, 3 * 2 * 32 * 64), float("nan"))[:, : 2 * 32 * 64].view(4, 2, 32, 64)
    apart.copy_(cache)
    slots = torch.tensor([[0, 33], [127, 64]])
    for one, other in zip(
        gather_tokens(cache, isa, slots), gather_tokens(apart, isa, slots), strict=True
    ):
        assert one.shape == (2, 2, 2, 32)
        assert torch.equal(one, other)
    everything = torch.cat(gather_tokens(cache, isa, torch.arange(4 * 32)))
    assert torch.equal(everything.flatten().sort().values, cache.flatten())
    for each in (apart, cache):
        layout = CacheLayout.of(each, isa)
        copy_slots(flat(layout, each), *(element_offsets(layout, part) for part in slots))
    assert torch.equal(apart, cache)


def test_refusals_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"'neon'.*vec, vec16, amx.*x86"):
        CacheLayout.of(numbered_cache("vec"), "neon")
    with pytest.raises(ValueError, match=r"divisible by 32, not 16.*--block-size"):
        CacheLayout.of(torch.zeros(2, 2, 16, 64), "amx")
    with pytest.raises(ValueError, match=r"shape \(2, 16, 64\)"):
        CacheLayout.of(torch.zeros(2, 16, 64), "vec")
    with pytest.raises(ValueError, match="strides"):
        CacheLayout.of(torch.zeros(2, 16, 2, 64).transpose(1, 2), "vec")
