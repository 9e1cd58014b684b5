"""Random trees, caches and batches for the tests of the scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_medusa.scorer.cpu import AttentionPlan, plan_trees
from vllm_medusa.scorer.layout import CacheLayout, gather_tokens
from vllm_medusa.scorer.reference import attention_reference, visible_keys
from vllm_medusa.tree.batch import TreeBatch


def random_tree_batch(sizes: list[int], generator: torch.Generator, shape: str) -> TreeBatch:
    """Trees of ``sizes`` nodes; "random", "chain" or "star" (all children of the root)."""
    nodes = max(sizes)
    parents = torch.full((len(sizes), nodes), -1)
    for b in range(len(sizes)):
        for i in range(1, nodes):
            if shape == "chain":
                parent = i - 1
            elif shape == "star":
                parent = 0
            else:
                parent = int(torch.randint(0, i, (), generator=generator))
            parents[b, i] = parent
    tree = TreeBatch.from_parents(parents, torch.tensor(sizes), nodes - 1)
    return replace(tree, max_depth=int(tree.depths.max()))


@dataclass(frozen=True)
class Case:
    query: Tensor
    kv_cache: Tensor
    tree: TreeBatch
    base: Tensor  # int64 [B]
    block_table: Tensor
    starts: Tensor  # int64 [B], query row of each root
    meta: AttentionPlan
    scale: float
    isa: str
    window: int | None
    parents: tuple[tuple[int, ...], ...]  # of each request's nodes
    slots: tuple[Tensor, ...]  # int64 [context + nodes] of each request

    def expected(self, softcap: float, sinks: Tensor | None, out: Tensor) -> Tensor:
        """Write the reference's rows to ``out``, in fp64; does not read ``meta``."""
        for parents, slots, row in zip(self.parents, self.slots, self.starts.tolist(), strict=True):
            count = len(parents)
            out[row : row + count], _ = attention_reference(
                self.query[row : row + count],
                *gather_tokens(self.kv_cache, self.isa, slots),
                visible_keys(len(slots) - count, parents, self.window),
                self.scale,
                softcap,
                sinks,
            )
        return out


def make_case(
    sizes: list[int],
    bases: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    shape: str = "random",
    isa: str = "vec16",
    gap: int = 0,
    seed: int = 0,
) -> Case:
    """Build a poisoned cache with numbers only in slots that the trees may see.

    ``gap`` rows precede each tree. Blocks before a sliding window point to
    block 0, the null block.
    """
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree_batch(sizes, generator, shape)
    needed = [-(-(c + n) // block) for c, n in zip(bases, sizes, strict=True)]
    num_blocks = sum(needed) + 2
    ids = torch.randperm(num_blocks - 1, generator=generator) + 1
    table = torch.full((len(sizes), max(needed) + 2), num_blocks - 1, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, heads[1], block, 2 * dim), float("nan"), dtype=dtype)
    layout = CacheLayout.of(kv_cache, isa)
    flat = layout.flat(kv_cache)
    used, all_slots = 0, []
    for b, (c, n) in enumerate(zip(bases, sizes, strict=True)):
        table[b, : needed[b]] = ids[used : used + needed[b]]
        used += needed[b]
        left = 0 if window is None else max(0, c - window + 1)
        table[b, : left // block] = 0
        index = torch.arange(c + n)
        all_slots.append(table[b, index // block].long() * block + index % block)
        slots = all_slots[-1][left:]
        tokens = torch.randn(c + n - left, heads[1], 2, dim, generator=generator).to(dtype)
        flat[layout.element_offsets(slots)] = tokens
    starts = torch.tensor([sum(sizes[:b]) + gap * (b + 1) for b in range(len(sizes))])
    rows = sum(sizes) + gap * len(sizes)
    query = torch.randn(rows, heads[0], dim, generator=generator).to(dtype)
    meta = plan_trees(
        tree,
        torch.tensor(bases, dtype=torch.int32),
        table,
        layout,
        heads[0],
        window,
        starts if gap else None,
    )
    return Case(
        query,
        kv_cache,
        tree,
        torch.tensor(bases),
        table,
        starts,
        meta,
        dim**-0.5,
        isa,
        window,
        parents=tuple(tuple(tree.parents[b, :n].tolist()) for b, n in enumerate(sizes)),
        slots=tuple(all_slots),
    )
