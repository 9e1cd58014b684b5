"""The scorer against vLLM's own CPU kernels: token packing, and results for chains."""

import pytest
import torch

vllm_platforms = pytest.importorskip("vllm.platforms")

from support.attention import gather_tokens, visible_keys  # noqa: E402
from support.in_torch import attention_reference  # noqa: E402
from support.paged_trees import random_tree_batch  # noqa: E402

from vllm_medusa.scorer.cpu import plan_trees, tree_attention  # noqa: E402
from vllm_medusa.scorer.layout import CacheLayout  # noqa: E402

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


def store(kv_cache, isa, keys, values, slots):
    ops.cpu_attn_reshape_and_cache(keys, values, *halves(kv_cache), slots, isa)


@pytest.mark.parametrize(("isa", "dtype", "dim", "block"), LAYOUTS)
def test_tokens_are_found_in_vllm_s_slots(isa, dtype, dim, block):
    kv_cache = torch.full((3, 2, block, 2 * dim), float("nan"), dtype=dtype)
    slots = torch.randperm(3 * block)[: block + 5]
    keys, values = torch.randn(2, len(slots), 2, dim).to(dtype)
    store(kv_cache, isa, keys, values, slots)
    found = gather_tokens(kv_cache, isa, slots)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def run_both(
    dtype, isa, sizes, bases, *, heads=(4, 2), dim=64, window=None, softcap=0.0, sinks=None
):
    """Chains with the stock kernel and with ours, and the fp64 reference."""
    block = 32
    generator = torch.Generator().manual_seed(sum(sizes) + sum(bases))
    tree = random_tree_batch(sizes, generator, "chain")
    lens = [c + n for c, n in zip(bases, sizes, strict=True)]
    count = -(-max(lens) // block)
    exact = torch.zeros(sum(sizes), heads[0], dim, dtype=torch.float64)
    stored = []
    table = torch.randperm(len(sizes) * count, generator=generator).to(torch.int32)
    table = table.view(len(sizes), count)
    kv_cache = torch.zeros(len(sizes) * count, heads[1], block, 2 * dim, dtype=dtype)
    for b, length in enumerate(lens):
        index = torch.arange(length)
        slots = table[b, index // block].long() * block + index % block
        tokens = torch.randn(2, length, heads[1], dim, generator=generator).to(dtype)
        store(kv_cache, isa, tokens[0], tokens[1], slots)
        stored.append(tokens)
    query = torch.randn(sum(sizes), heads[0], dim, generator=generator).to(dtype)
    layout = CacheLayout.of(kv_cache, isa)
    meta = plan_trees(tree, torch.tensor(bases), table, layout, heads[0], window)
    truncate = kernel_truncates()
    ours = tree_attention(query, kv_cache, meta, dim**-0.5, softcap, sinks, truncate=truncate)
    for b, (n, c) in enumerate(zip(sizes, bases, strict=True)):
        rows = slice(sum(sizes[:b]), sum(sizes[: b + 1]))
        seen = visible_keys(c, range(-1, n - 1), window)
        exact[rows] = attention_reference(query[rows], *stored[b], seen, dim**-0.5, softcap, sinks)

    starts = tree.cu_num_nodes.to(torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(sizes),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        seq_lens=seq_lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=window or -1,
        isa=isa,
        enable_kv_split=True,
    )
    stock = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=halves(kv_cache)[0],
        value_cache=halves(kv_cache)[1],
        output=stock,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=window or -1,
        block_table=table,
        softcap=softcap,
        scheduler_metadata=plan,
        s_aux=sinks,
    )
    return ours, stock, exact


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (3.0, False), (0.0, True)])
def test_a_chain_equals_the_stock_kernel(isa, window, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, 4) if with_sinks else None
    ours, stock, exact = run_both(
        torch.float32, isa, [9, 1, 64], [100, 31, 0], window=window, softcap=softcap, sinks=sinks
    )
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
