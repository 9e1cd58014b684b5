"""The scorer against vLLM's own CPU kernels: token packing, and results for chains."""

import pytest
import torch

vllm_platforms = pytest.importorskip("vllm.platforms")

from support.attention import gather_tokens  # noqa: E402
from support.paged_trees import make_case  # noqa: E402

from vllm_medusa.scorer.cpu import tree_attention  # noqa: E402

if not vllm_platforms.current_platform.is_cpu():
    pytest.skip("needs a CPU build of vLLM", allow_module_level=True)
vllm_platforms.current_platform.import_kernels()

from vllm import _custom_ops as ops  # noqa: E402

from vllm_medusa.integration.attention.cpu_attention import kernel_truncates  # noqa: E402
from vllm_medusa.integration.compat import packed_linear  # noqa: E402


def can_pack_amx():
    """Whether vLLM's build for this CPU supports the AMX layout."""
    keys = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    cache = torch.zeros(1, 1, 64, 32, dtype=torch.bfloat16).chunk(2, dim=2)
    try:
        ops.cpu_attn_reshape_and_cache(keys, keys, *cache, torch.zeros(1).long(), "amx")
    except RuntimeError:
        return False
    return True


AMX = pytest.param("amx", marks=pytest.mark.skipif(not can_pack_amx(), reason="no AMX layout here"))
LAYOUTS = [
    pytest.param(isa, dtype, dim, block, marks=AMX.marks if isa == "amx" else ())
    for isa, dtypes, multiple in (
        ("vec", (torch.float32, torch.bfloat16, torch.float16), 32),
        ("vec16", (torch.float32, torch.bfloat16, torch.float16), 16),
        ("amx", (torch.bfloat16,), 32),
    )
    for dtype in dtypes
    for dim in (32, 64, 80, 96, 128, 192, 256)
    for block in (16, 32, 128)
    if dim % multiple == 0 and block % multiple == 0
]


def halves(kv_cache):
    """Key and value cache as the backend passes them to the kernels."""
    blocks, heads, block, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2 * block, width // 2).chunk(2, dim=2)


@pytest.mark.parametrize(("isa", "dtype", "dim", "block"), LAYOUTS)
def test_tokens_are_found_in_vllm_s_slots(isa, dtype, dim, block):
    kv_cache = torch.full((3, 2, block, 2 * dim), float("nan"), dtype=dtype)
    slots = torch.randperm(3 * block)[: block + 5]
    keys, values = torch.randn(2, len(slots), 2, dim).to(dtype)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves(kv_cache), slots, isa)
    found = gather_tokens(kv_cache, isa, slots)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def run_both(dtype, isa, sizes, bases, **options):
    """Chains with the stock kernel and with ours, and the fp64 reference."""
    options = {"heads": (4, 2), "dim": 64, "block": 32, "dtype": dtype, "isa": isa} | options
    case = make_case(sizes, bases, shape="chain", **options)
    query, given = case.query.contiguous(), case.paged.options
    softcap, sinks, window = given["softcap"], given["sinks"], given["window"]
    truncate = kernel_truncates()
    ours = tree_attention(
        query, case.kv_cache, case.meta, case.scale, softcap, sinks, truncate=truncate
    )
    shared = {
        "query_start_loc": case.paged.batch.cu_query_lens,
        "seq_lens": case.paged.batch.seq_lens,
        "causal": True,
    }
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(sizes),
        num_heads=query.shape[1],
        num_kv_heads=case.kv_cache.shape[1],
        head_dim=query.shape[2],
        dtype=dtype,
        sliding_window_size=window or -1,
        isa=isa,
        enable_kv_split=True,
        **shared,
    )
    stock = torch.empty_like(query)
    keys, values = halves(case.kv_cache.nan_to_num())  # it multiplies unused slots by 0
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=stock,
        scale=case.scale,
        alibi_slopes=None,
        sliding_window=window or -1,
        block_table=case.block_table,
        softcap=softcap,
        scheduler_metadata=plan,
        s_aux=sinks,
        **shared,
    )
    return ours, stock, case.paged.expected()


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (3.0, False), (0.0, True)])
def test_a_chain_equals_the_stock_kernel(isa, window, softcap, with_sinks):
    options = {"window": window, "softcap": softcap, "sinks": with_sinks}
    ours, stock, exact = run_both(torch.float32, isa, [9, 1, 64], [100, 31, 0], **options)
    assert (ours.double() - exact).abs().max() < 1e-5
    # the stock kernel computes softcaps with a fast tanh or exp
    assert (ours - stock).abs().max() < (1e-3 if softcap else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("nodes", "base"), [(1, 512), (8, 256), (16, 1000), (64, 100)])
def test_rounding_equals_plain_decoding(dtype, nodes, base):
    """Near-ties between tokens must be resolved as without a tree."""
    ours, stock, exact = run_both(dtype, "vec", [nodes], [base], heads=(14, 2))
    mine, theirs = ((x.double() - exact).abs() for x in (ours, stock))
    assert mine.max() <= 2 * theirs.max()
    assert mine.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
@pytest.mark.parametrize(("nodes", "base"), [(1, 512), (8, 256), (64, 100)])
def test_bf16_outputs_equal_plain_decoding(isa, nodes, base, monkeypatch):
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    ours, stock, _ = run_both(torch.bfloat16, isa, [nodes], [base], heads=(14, 2))
    assert (ours != stock).float().mean() < 0.01
    if isa == "amx":
        return
    # negative control: rounding where the kernel truncates, or vice versa
    other = not kernel_truncates()
    monkeypatch.setitem(globals(), "kernel_truncates", lambda: other)
    wrong, stock, _ = run_both(torch.bfloat16, isa, [nodes], [base], heads=(14, 2))
    assert (wrong != stock).float().mean() > 0.2


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_multiply_without_a_onednn_kernel(dtype, refuses, monkeypatch):
    """Without AVX-512, oneDNN has none for bf16 and fp16; vLLM's own layers then use torch."""

    def refuse(*args):
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    if refuses:
        monkeypatch.setattr(ops, "create_onednn_mm", refuse)
    weight, bias, x = torch.randn(64, 32).to(dtype), torch.randn(64).to(dtype), torch.randn(3, 32)
    product = packed_linear(weight, bias)(x.to(dtype))
    exact = torch.nn.functional.linear(x.to(dtype).double(), weight.double(), bias.double())
    assert (product.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max()
