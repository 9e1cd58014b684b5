"""The reference against torch's SDPA, and the kernel's torch twin against the reference.

Everything is fp64, so 1e-12 is a thousand roundings of numbers near 1.
"""

import pytest
import torch
from support.in_torch import paged_tree_attention_torch
from support.paged_batches import PADDING, Case, chunk, decode, make_case, tree
from torch.nn.functional import scaled_dot_product_attention

from vllm_medusa import kernels
from vllm_medusa.scorer.paged import FP8_DTYPES, SplitWorkspace

MIXED = [tree(7, 20), chunk(5, 9), PADDING, decode(33), tree(1, 0), tree(12, 16), chunk(17)]


def twin(case: Case, **changes):
    return case.run(paged_tree_attention_torch, torch.float64, **changes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 4},
        {"window": 19, "softcap": 2.0, "sinks": True},
        {"heads": (3, 3), "sinks": True, "layout": "tokens first"},
        {"heads": (4, 1), "softcap": 1.5, "block": 32, "layout": "channels first"},
        {"kv_dtype": FP8_DTYPES[0]},
        {"kv_dtype": FP8_DTYPES[1], "dtype": torch.bfloat16, "window": 6},
        {"static": True, "nodes": 14},
    ],
)
def test_the_twin_equals_the_reference(options):
    case = make_case(MIXED, dim=16, spare_rows=2, **options)
    error = case.difference(twin(case))
    assert error < 1e-12


def test_reference_is_sdpa_for_a_chunk():
    case = make_case([chunk(11, 30)], heads=(6, 2), dim=32)
    out = case.expected()
    size = case.key_cache.shape[1]
    keys, values = (
        c[case.slots[0] // size, case.slots[0] % size].double().transpose(0, 1)
        for c in (case.key_cache, case.value_cache)
    )
    mask = torch.ones(11, 41, dtype=torch.bool).tril(30)
    query = case.query.double().transpose(0, 1)
    expected = scaled_dot_product_attention(
        query, keys, values, mask, scale=case.scale, enable_gqa=True
    )
    assert (out - expected.transpose(0, 1)).abs().max() < 1e-12


def test_dummy_batch_without_context_for_its_rows():
    """During graph capture seq_lens may be 1 for every request, with any number of rows."""
    case = make_case([tree(6, 0), chunk(4, 0)])
    case = case.with_batch(seq_lens=torch.ones(2, dtype=torch.int32))
    out = twin(case)
    assert out.isfinite().all()
    assert (out[6:9] == 0).all()  # only the last row has a slot
    assert (out[9] != 0).all()


def test_a_gpu_requires_triton(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="Medusa on cuda requires Triton"):
        kernels.uses_kernel.__wrapped__("cuda")


def test_workspace_may_be_created_in_inference_mode():
    with torch.inference_mode():
        space = SplitWorkspace.allocate(10, 16, "cpu")
    space.values.fill_(0.0)
    space.lse.fill_(0.0)


def test_workspace_states_its_number_of_parts():
    space = SplitWorkspace.allocate(100, 16, "cpu")
    assert space.max_splits(5, 4, 16) == 5
    assert space.max_splits(5, 4, 32) == 2  # layers with wider heads
    assert space.max_splits(5, 4, 8) == 5
    assert space.max_splits(1000, 4, 16) == space.max_splits(1000, 4, 64) == 1
    assert space.max_splits(0, 4, 16) == 100
