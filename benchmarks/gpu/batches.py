"""Steps of a server: requests that bring the rows of one tree each, and maybe a prompt's chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.presets import load_preset
from vllm_medusa.tree.topology import TokenTree


def step_tree(nodes: int) -> TokenTree:
    """A tree of so many nodes that uses five heads: their best choices, then a published tree's."""
    chain = [(0,) * depth for depth in range(1, 6)]
    paths = [*chain, *(p for p in load_preset("vicuna_7b_stage2").paths if p not in chain)]
    return TokenTree.from_paths(paths[: nodes - 1]) if nodes > 1 else TokenTree(())


def step_batch(
    tree: TreeTensors,
    seq_lens: Tensor,  # int32 [B]
    block_table: Tensor,  # int32 [B, max_blocks]
    *,
    chunk: int = 0,
    num_splits: int = 1,
    workspace: SplitWorkspace | None = None,
) -> PagedBatch:
    """All requests bring a tree, but the last one, where ``chunk`` says so, rows of a prompt."""
    count, nodes, device = len(seq_lens), tree.num_nodes, seq_lens.device
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * nodes
    is_tree = torch.full((count,), nodes > 1, device=device)
    if chunk:
        starts[-1] += chunk - nodes
        is_tree[-1] = False
    return PagedBatch(
        cu_query_lens=starts,
        seq_lens=seq_lens,
        block_table=block_table,
        is_tree=is_tree,
        ancestor_bits=tree.ancestor_bits.expand(count, -1, -1),
        depths=tree.depths.expand(count, -1),
        max_query_len=max(nodes, chunk),
        num_splits=num_splits,
        workspace=workspace,
    )


def choose_parts(query: Tensor, key_cache: Tensor, batch: int, nodes: int, length: int) -> int:
    """Into how many parts the keys of a step go.

    ``query`` is [T, Hq, D], ``key_cache`` [num_blocks, block_size, Hkv, D].
    """
    from vllm_medusa.scorer.launch import choose_splits

    heads = (query.shape[1], key_cache.shape[2], query.shape[2])
    kinds = (query.dtype, key_cache.dtype, query.device)
    return choose_splits(batch, *heads, nodes, length, *kinds)
