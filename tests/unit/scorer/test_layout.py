"""The packing itself is checked against vLLM in tests/worker/test_cpu_layout.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import element_offsets, flat, gather_tokens

from vllm_medusa.kv import copy_slots
from vllm_medusa.scorer.layout import SUPPORTED_ISAS, CacheLayout


def numbered_cache(isa: str, blocks: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(blocks * 2 * 32 * 64).to(dtype).view(blocks, 2, 32, 64)


def copy_tokens(cache: torch.Tensor, isa: str, src: torch.Tensor, dst: torch.Tensor) -> None:
    layout = CacheLayout.of(cache, isa)
    copy_slots(flat(layout, cache), *(element_offsets(layout, each) for each in (src, dst)))


@pytest.mark.parametrize("isa", SUPPORTED_ISAS)
def test_offsets_cover_every_element_once(isa):
    cache = numbered_cache(isa)
    keys, values = gather_tokens(cache, isa, torch.arange(4 * 32))
    assert torch.equal(torch.cat((keys, values)).flatten().sort().values, cache.flatten())


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
    copy_tokens(apart, isa, slots[0], slots[1])
    copy_tokens(cache, isa, slots[0], slots[1])
    assert torch.equal(apart, cache)


@settings(max_examples=50)
@given(st.sampled_from(SUPPORTED_ISAS), st.permutations(range(128)), st.integers(0, 8))
def test_copy_reads_everything_before_writing(isa, slots, count):
    cache = numbered_cache(isa)
    src, dst = torch.tensor(slots[20:28]), torch.tensor(slots[20:28])  # no-ops
    src[:count] = torch.tensor(slots[:count])
    dst[:count] = torch.tensor(slots[1 : count + 1])  # a chain: each destination is the next source
    before = gather_tokens(cache, isa, torch.arange(128))
    copy_tokens(cache, isa, src, dst)
    after = gather_tokens(cache, isa, torch.arange(128))
    moved = torch.arange(128)
    for s, d in zip(src[:count].tolist(), dst[:count].tolist(), strict=True):
        moved[d] = s
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[moved])


def test_refusals_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"'neon'.*vec, vec16, amx.*x86"):
        CacheLayout.of(numbered_cache("vec"), "neon")
    with pytest.raises(ValueError, match=r"divisible by 32, not 16.*--block-size"):
        CacheLayout.of(torch.zeros(2, 2, 16, 64), "amx")
    with pytest.raises(ValueError, match=r"shape \(2, 16, 64\)"):
        CacheLayout.of(torch.zeros(2, 16, 64), "vec")
    with pytest.raises(ValueError, match="strides"):
        CacheLayout.of(torch.zeros(2, 16, 2, 64).transpose(1, 2), "vec")
