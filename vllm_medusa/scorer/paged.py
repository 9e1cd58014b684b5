"""Attention over a paged cache for batches that mix trees, plain decodes and prefill chunks.

Request b brings ``n = cu_query_lens[b + 1] - cu_query_lens[b]`` query rows. Their keys are in the
cache already, behind ``base = seq_lens[b] - n`` tokens of context: row i in slot ``base + i`` of
the request. What row i is and sees:

    request    position of row i         which rows j it sees
    tree       base + depths[b, i]       j <= i, and bit j of ancestor_bits[b, i] is set
    other      base + i                  j <= i

All of the context is seen too. A sliding window w hides every key whose *position* is not above
that of the query minus w; siblings share a position. A tree request may bring fewer rows than it
has nodes: nodes are parents first, so a prefix is still a tree. Requests without rows are padding
and are skipped, and so are query rows behind ``cu_query_lens[-1]``. A row that sees nothing (which
only a dummy batch has, with seq_len < n) becomes zero.

Slots that no row sees are never read: they may hold NaN, and block table entries behind the last
block in use, or left behind by the window, may hold anything.

`paged_tree_attention` picks the Triton kernel (`launch`, `kernel`) or the reference below, which
have the same signature.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from vllm_medusa.tree.packing import num_words, unpack_ancestors

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, eq=False)
class SplitWorkspace:
    """Memory for partial results: for every row, head and part one normalised output and its LSE.

    Made once and reused by every layer and step. Whoever runs the context by other means can merge
    in the same way: the LSE are natural logarithms of the sum of exp(logit), sinks left out.
    """

    values: Tensor  # fp32 [capacity * head_size]
    lse: Tensor  # fp32 [capacity]

    @classmethod
    def allocate(cls, capacity: int, head_size: int, device: torch.device | str) -> SplitWorkspace:
        """``capacity`` is the largest rows * query heads * parts of any step."""
        with torch.inference_mode(False):  # else only inference mode could write to it
            values = torch.empty(capacity * head_size, dtype=torch.float32, device=device)
            return cls(values, torch.empty(capacity, dtype=torch.float32, device=device))

    def max_splits(self, num_rows: int, num_heads: int, head_size: int) -> int:
        """The most parts that a step of so many rows can be cut into, at least 1."""
        capacity = min(self.lse.numel(), self.values.numel() // head_size)
        return max(1, capacity // max(1, num_rows * num_heads))


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The requests of one step, shared by all layers; every tensor lives on the device.

    Only shapes and the two numbers are known to the host. For a static tree ``ancestor_bits`` and
    ``depths`` are expanded views (stride 0 over requests).
    """

    cu_query_lens: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B], context plus the rows of this step
    block_table: Tensor  # int32 [B, max_blocks]
    is_tree: Tensor  # bool [B]
    ancestor_bits: Tensor  # int64 [B, N, W]
    depths: Tensor  # integer [B, N]
    max_query_len: int  # upper bound of n; more rows than this in a request stay unwritten
    num_splits: int = 1  # from `tiles.num_splits`; more than 1 needs the workspace
    workspace: SplitWorkspace | None = None

    def __post_init__(self) -> None:
        batch, nodes, words = self.ancestor_bits.shape
        shapes = {
            "cu_query_lens": (batch + 1,),
            "seq_lens": (batch,),
            "block_table": (batch, self.block_table.shape[-1]),
            "is_tree": (batch,),
            "depths": (batch, nodes),
        }
        for name, shape in shapes.items():
            actual = tuple(getattr(self, name).shape)
            if actual != shape:
                raise ValueError(
                    f"{name} has shape {actual}; with ancestor_bits for {batch} requests of "
                    f"{nodes} nodes it must be {shape}"
                )
        if self.is_tree.dtype != torch.bool:
            raise ValueError(f"is_tree is {self.is_tree.dtype}; it must be torch.bool")
        if words < num_words(nodes) or self.ancestor_bits.dtype != torch.int64:
            raise ValueError(
                f"ancestor_bits is {self.ancestor_bits.dtype} with {words} words a row; {nodes} "
                f"nodes need torch.int64 and {num_words(nodes)} words, as `pack_ancestors` makes"
            )
        if self.num_splits > 1 and self.workspace is None:
            raise ValueError(
                f"num_splits is {self.num_splits} without a workspace; make one with "
                "SplitWorkspace.allocate, or set num_splits to 1"
            )


def paged_tree_attention(
    query: Tensor,  # [T, Hq, D]
    key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    batch: PagedBatch,
    scale: float,
    *,
    out: Tensor,  # [T, Hq, D]
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,  # [Hq]
    k_scale: Tensor | None = None,  # fp32, one element
    v_scale: Tensor | None = None,  # fp32, one element
    lse: Tensor | None = None,  # fp32 [T, Hq]
) -> Tensor:
    """Attend every row to what it sees; keys and values are in the cache.

    On a GPU, or where Triton interprets, this is the kernel: it allocates nothing and never waits
    for the device. Elsewhere it is the reference, for tests.

    Args:
        query: fp16, bf16 or fp32, rows and heads may be strided, channels not.
        key_cache: Any strides, of the dtype of the queries or fp8; vLLM's uint8 caches must be
            viewed as the fp8 dtype that they hold. e4m3 needs a GPU of capability 8.9.
        value_cache: Like ``key_cache``.
        batch: The requests.
        scale: Factor on the logits.
        out: Like ``query``. Rows of no request keep their values.
        softcap: Logits become softcap * tanh(logits / softcap); 0 for none.
        window: Keys at positions > p - window are seen from position p; None for all.
        sinks: One more logit a head with no value behind it.
        k_scale: What fp8 keys were divided by; None for 1.
        v_scale: What fp8 values were divided by; None for 1.
        lse: Receives log(sum(exp(logits))) of every row and head, sinks included.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, stride or number that can't be.
        TypeError: A dtype that isn't supported.
        ImportError: A GPU without Triton.

    """
    check_arguments(query, key_cache, value_cache, batch, out, window, sinks, lse)
    if uses_kernel(query.device.type):
        from vllm_medusa.scorer.launch import paged_tree_attention_kernel as run
    else:
        run = paged_tree_attention_reference
    return run(
        query,
        key_cache,
        value_cache,
        batch,
        scale,
        out=out,
        softcap=softcap,
        window=window,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        lse=lse,
    )


@functools.cache
def uses_kernel(device_type: str) -> bool:
    """Whether tensors on such a device go to Triton.

    Raises:
        ImportError: They must, and Triton isn't installed.

    """
    installed = find_spec("triton") is not None
    if device_type == "cpu":
        if not installed:
            return False
        from vllm_medusa.scorer.kernel import INTERPRETED

        return INTERPRETED
    if not installed:
        raise ImportError(
            f"Tree attention on {device_type} runs on Triton, which isn't installed. "
            "Install it with `pip install triton`."
        )
    return True


def check_arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    out: Tensor,
    window: int | None,
    sinks: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Raise for what `paged_tree_attention` can't take; reads shapes and strides only."""
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[2]
    if query.dtype not in QUERY_DTYPES or out.dtype != query.dtype:
        raise TypeError(
            f"queries are {query.dtype} and out is {out.dtype}; both must be the same of "
            f"{', '.join(map(str, QUERY_DTYPES))}"
        )
    if key_cache.dtype not in (query.dtype, *FP8_DTYPES) or value_cache.dtype != key_cache.dtype:
        raise TypeError(
            f"the caches are {key_cache.dtype} and {value_cache.dtype} with {query.dtype} "
            f"queries; both must be {query.dtype} or one of {', '.join(map(str, FP8_DTYPES))}. "
            "View a uint8 cache as the fp8 dtype that it holds."
        )
    if key_cache.shape != value_cache.shape or key_cache.dim() != 4 or key_cache.shape[3] != dim:
        raise ValueError(
            f"the caches have shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}; "
            f"both must be [num_blocks, block_size, kv heads, {dim}], as "
            "kv_cache.transpose(1, 2).split(head_size, -1) gives"
        )
    if heads % kv_heads or not 1 <= dim <= MAX_HEAD_SIZE:
        raise ValueError(
            f"{heads} query heads of {dim} channels and {kv_heads} key heads; the first must be "
            f"a multiple of the last, and a head have at most {MAX_HEAD_SIZE} channels"
        )
    if out.shape != query.shape or query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(
            f"query and out have shapes {tuple(query.shape)} and {tuple(out.shape)}, strides "
            f"{query.stride()} and {out.stride()}; the shapes must agree and channels be adjacent"
        )
    if window is not None and window < 1:
        raise ValueError(f"sliding window is {window}; it must be at least 1, or None for none")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; {heads} heads need ({heads},)")
    if lse is not None and (lse.shape != (rows, heads) or not lse.is_contiguous()):
        raise ValueError(f"lse has shape {tuple(lse.shape)}; it must be contiguous {(rows, heads)}")
    if batch.workspace is not None and batch.num_splits > 1:
        most = batch.workspace.max_splits(rows, heads, dim)
        if batch.num_splits > most:
            raise ValueError(
                f"num_splits is {batch.num_splits}, but for {rows} rows of {heads} heads the "
                f"workspace has room for {most}; allocate it for the largest step, or use fewer"
            )


def paged_tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    out: Tensor,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`paged_tree_attention` to be read: one request at a time, in fp64, with a dense mask.

    ``out`` and ``lse`` may be fp64 here. Reads lengths on the host.
    """
    block_size, kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    starts = batch.cu_query_lens.tolist()
    for b, length in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        base = length - n
        place, seen = _own_rows(batch, b, n)  # [n], [n, n]
        context = torch.arange(max(base, 0), device=query.device)
        slots = torch.cat((context, base + torch.arange(n, device=query.device)))  # [L]
        positions = torch.cat((context, base + place))  # [L]
        seen = torch.cat((seen.new_ones(n, len(context)), seen), 1)  # [n, L]
        seen &= slots >= 0
        if window is not None:
            seen &= positions > (base + place).unsqueeze(1) - window
        used = seen.any(0)
        slots, seen = slots[used], seen[:, used]
        blocks = batch.block_table[b, slots // block_size].long()
        keys, values = (
            _tokens(cache, blocks, slots % block_size, factor).repeat_interleave(group, 1)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )  # [L, Hq, D]
        logits = torch.einsum("nhd,lhd->nhl", query[rows].double(), keys) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen.unsqueeze(1), float("-inf"))
        total = torch.logsumexp(logits, 2)  # [n, Hq]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double())
        shift = total.masked_fill(total == float("-inf"), 0.0)  # of rows that see nothing
        weights = torch.exp(logits - shift.unsqueeze(2))
        out[rows] = torch.einsum("nhl,lhd->nhd", weights, values).to(out.dtype)
        if lse is not None:
            lse[rows] = total.to(lse.dtype)
    return out


def _own_rows(batch: PagedBatch, b: int, n: int) -> tuple[Tensor, Tensor]:
    """Each row's position behind the context, int64 [n], and the rows that it sees, bool [n, n]."""
    causal = torch.ones(n, n, dtype=torch.bool, device=batch.seq_lens.device).tril()
    if not bool(batch.is_tree[b]):
        return torch.arange(n, device=causal.device), causal
    ancestors = unpack_ancestors(batch.ancestor_bits[b, :n], n)
    return batch.depths[b, :n].long(), ancestors & causal


def _tokens(cache: Tensor, blocks: Tensor, offsets: Tensor, factor: Tensor | None) -> Tensor:
    """fp64 [L, Hkv, D], dequantised."""
    if cache.dtype in FP8_DTYPES:  # which can't be indexed everywhere
        tokens = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype).double()
    else:
        tokens = cache[blocks, offsets].double()
    return tokens if factor is None else tokens * factor.double().reshape(())
