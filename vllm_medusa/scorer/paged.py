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
and are skipped, and so are query rows behind ``cu_query_lens[-1]``. With ``rows_before`` every
request has so many rows more, the first ones, whose keys came with earlier calls and which ask
nothing now: ``base`` is that much less, and the queries are those of the rows behind. A row that
sees nothing (which only a dummy batch has, with seq_len < n) becomes zero.

Slots that no row sees are never read: they may hold NaN, and block table entries behind the last
block in use, or left behind by the window, may hold anything.

`dispatch.paged_tree_attention` computes it: by the Triton kernel (`launch`, `kernel`) or by torch
(`paged_torch`), which have the same signature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.tree.packing import num_words

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
    max_query_len: int  # upper bound of queries; more than this in a request stay unwritten
    num_splits: int = 1  # from `tiles.num_splits`; more than 1 needs the workspace
    workspace: SplitWorkspace | None = None
    rows_before: int = 0  # own rows of each request without a query, first of all

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
