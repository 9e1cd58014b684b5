"""The CPU path against the fp64 reference; every cache is NaN wherever no tree may read.

Tolerances: fp32 results differ by summation order, ``1e-5`` is 80 ulp of outputs near 1. The half
types add one rounding of the output, half an ulp of its largest value (4 and 2**-8, 4 and 2**-11).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_trees import Case, make_case

from vllm_medusa.scorer.cpu import plan_trees, tree_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}
UNTOUCHED = 7.0


def error(case: Case, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> float:
    """Largest difference from the reference; rows between the trees must be unchanged."""
    out = torch.full_like(case.query, UNTOUCHED)
    expected = torch.full(case.query.shape, UNTOUCHED, dtype=torch.float64)
    result = tree_attention(case.query, case.kv_cache, case.meta, case.scale, softcap, sinks, out)
    assert result is out
    case.expected(softcap, sinks, expected)
    assert expected.isfinite().all()
    return (out.double() - expected).abs().max().item()  # NaN fails every comparison


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 5))
    isa = draw(st.sampled_from(("vec", "vec16", "amx")))
    size = st.integers(1, 20)
    even = draw(st.booleans())
    sizes = [draw(size)] * batch if even else [draw(size) for _ in range(batch)]
    return make_case(
        sizes,
        [draw(st.integers(0, 100)) for _ in range(batch)],
        heads=draw(st.sampled_from(((4, 2), (3, 3), (4, 1), (6, 2)))),
        dim=draw(st.sampled_from((32, 64))),
        block=32 if isa == "amx" else draw(st.sampled_from((16, 32))),
        dtype=torch.bfloat16 if isa == "amx" else draw(st.sampled_from(tuple(TOLERANCE))),
        window=draw(st.sampled_from((None, 1, 3, 16, 20, 50))),
        shape=draw(st.sampled_from(("random", "chain", "star"))),
        isa=isa,
        gap=draw(st.sampled_from((0, 2))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=150)
@given(cases(), st.sampled_from((0.0, 2.0)), st.booleans())
def test_equals_the_reference(case, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, case.query.shape[1]) if with_sinks else None
    assert error(case, softcap, sinks) < TOLERANCE[case.query.dtype]


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 256])
@pytest.mark.parametrize("base", [0, 1, 15, 16, 17])
def test_boundaries_of_trees_and_blocks(nodes, base):
    assert error(make_case([nodes], [base])) < 1e-5
    assert error(make_case([nodes], [base], dtype=torch.bfloat16)) < 4 * 2**-8


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_smaller_than_the_tree_is_deep(window):
    case = make_case([12, 7], [30, 3], window=window, shape="chain")
    assert error(case) < 1e-5
    # a node must not see its own root once that is `window` tokens above it
    touched = replace(case, kv_cache=case.kv_cache.clone())
    root = int(case.block_table[0, 1]) * 16 + 14  # position 30
    layout = case.meta.layout
    layout.flat(touched.kv_cache)[layout.element_offsets(torch.tensor([root]))] += 1.0
    before, after = (tree_attention(c.query, c.kv_cache, c.meta, c.scale) for c in (case, touched))
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == list(range(window))


def test_a_changed_slot_affects_exactly_its_descendants():
    case = make_case([9, 14], [20, 33])
    layout = case.meta.layout
    before = tree_attention(case.query, case.kv_cache, case.meta, case.scale)
    for node in range(14):
        cache = case.kv_cache.clone()
        index = 33 + node
        slot = int(case.block_table[1, index // 16]) * 16 + index % 16
        layout.flat(cache)[layout.element_offsets(torch.tensor([slot]))] += 1.0
        after = tree_attention(case.query, cache, case.meta, case.scale)
        changed = (before != after).flatten(1).any(1)
        assert torch.equal(changed[9:], case.tree.ancestors[1, :, node])
        assert not changed[:9].any()


def test_a_causal_mask_is_not_a_tree():
    case = make_case([16], [20])
    tree = case.tree
    causal = replace(tree, ancestors=torch.ones_like(tree.ancestors).tril())
    assert not torch.equal(causal.ancestors, tree.ancestors)
    meta = plan_trees(causal, case.base, case.block_table, case.meta.layout, 4)
    assert error(case) < 1e-5
    assert error(replace(case, meta=meta)) > 0.05


@pytest.mark.parametrize("wrong", ["base", "blocks", "window", "depths", "rows", "ancestors"])
def test_wrong_metadata_is_detected(wrong):
    """Negative controls: the reference reads no metadata, so every wrong field must be detected."""
    case = make_case([16, 16], [40, 40], window=5)
    assert error(case) < 1e-5
    tree = case.tree
    fields = {
        "tree": tree,
        "base": case.base - int(wrong == "base"),
        "block_table": case.block_table.flip(0) if wrong == "blocks" else case.block_table,
        "window": 4 if wrong == "window" else 5,
        "row_starts": case.starts.flip(0) if wrong == "rows" else case.starts,
    }
    if wrong == "depths":
        fields["tree"] = replace(tree, depths=torch.arange(16).expand(2, -1))
    if wrong == "ancestors":
        ancestors = tree.ancestors.clone()
        ancestors[1, 15, 15] = False
        fields["tree"] = replace(tree, ancestors=ancestors)
    broken = plan_trees(layout=case.meta.layout, num_heads=4, **fields)
    assert not error(replace(case, meta=broken)) < 1e-2  # also false for NaN


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1900])
def test_long_contexts_are_split(dtype, window):
    case = make_case([1, 2], [2100, 5], heads=(4, 1), dtype=dtype, window=window)
    assert error(case, 3.0, torch.linspace(-1, 1, 4)) < TOLERANCE[dtype]


def test_layers_share_a_plan_and_rows_may_be_strided():
    case = make_case([6, 3], [40, 9], heads=(4, 2))
    packed = torch.randn(9, 4 + 2 + 2, 32)
    strided = replace(case, query=packed[:, :4])
    assert not strided.query.is_contiguous()
    assert error(case) < 1e-5
    assert error(strided) < 1e-5


def test_refusals_name_the_value_and_the_remedy():
    case = make_case([4], [5])
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*--kv-cache-dtype auto"):
        tree_attention(case.query, case.kv_cache.bfloat16(), case.meta, 1.0)
    fields = case.tree, case.base, case.block_table, case.meta.layout
    with pytest.raises(ValueError, match="window is 0"):
        plan_trees(*fields, 4, 0)
    with pytest.raises(ValueError, match="5 query heads"):
        plan_trees(*fields, 5)


def test_truncation_is_toward_zero():
    """As in vLLM's kernel for CPUs without bf16 instructions; about half differ."""
    case = make_case([9, 3], [40, 7], dtype=torch.bfloat16)
    both = [
        tree_attention(case.query, case.kv_cache, case.meta, case.scale, truncate=truncate)
        for truncate in (False, True)
    ]
    rounded, cut = (out.view(torch.int16) for out in both)  # ordered within a sign
    assert set((rounded - cut).unique().tolist()) == {0, 1}
    assert 0.3 < (rounded != cut).float().mean() < 0.7
