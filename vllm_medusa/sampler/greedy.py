"""Greedy acceptance: a node is kept when it is the target's argmax at its parent.

The output equals plain greedy decoding. All nodes are verified at once, without a walk: at most one
child of a node is kept, so the kept nodes below the root form one path.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from vllm_medusa.kernels import CPU_DTYPES, cpu_function
from vllm_medusa.sampler.path import Path, Verdict, accept_path, close_path
from vllm_medusa.tree.batch import TreeBatch

_greedy_walk = cpu_function(
    "greedy_walk", c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64,
    c_void_p, c_void_p, c_int64, *[c_void_p] * 4,
)  # fmt: skip


def greedy_verdict(tree: TreeBatch, token_ids: Tensor, target_argmax: Tensor) -> Verdict:
    """Verify ``token_ids`` int64 [B, N] with ``target_argmax`` int64 [B, N] at each node.

    Equals `lossless_walk` with a sampler that returns the argmax: of siblings with the same
    token, the first in node order is kept.
    """
    parents = tree.parents.clamp(min=0)  # [B, N]
    index = torch.arange(tree.max_nodes, device=parents.device).expand_as(parents)
    match = (token_ids == target_argmax.gather(1, parents)) & tree.valid & (index > 0)
    candidate = torch.where(match, index, tree.max_nodes)  # [B, N]
    first = torch.full_like(parents, tree.max_nodes)  # [B, N] by parent: its first matching child
    first = first.scatter_reduce(1, parents, candidate, "amin")
    path = accept_path(tree, match & (first.gather(1, parents) == index))
    final = target_argmax.gather(1, path.last_node.unsqueeze(1)).squeeze(1)
    return close_path(path, token_ids, final)


def greedy_walk(
    logits: Tensor,  # [R, V] on the host, fp32, bf16 or fp16
    cu_nodes: Tensor,  # int64 [B + 1], the first row of each request's nodes
    tree: TreeBatch,
    token_ids: Tensor,  # int64 [B, N]
) -> Verdict:
    """`greedy_verdict` on CPUs, by `greedy.cpp`: only rows on the path are read."""
    batch, columns = tree.batch_size, tree.max_depth + 1
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    counts, parents = tree.num_nodes.to(torch.int64), tree.parents.contiguous()
    path, output = torch.empty((2, batch, columns), dtype=torch.int64)
    num_accepted, last_node = torch.empty((2, batch), dtype=torch.int64)
    _greedy_walk(
        rows.data_ptr(), CPU_DTYPES[rows.dtype], rows.shape[1], rows.stride(0),
        cu_nodes.data_ptr(), counts.data_ptr(), batch, tree.max_nodes, parents.data_ptr(),
        token_ids.data_ptr(), columns, path.data_ptr(), output.data_ptr(),
        num_accepted.data_ptr(), last_node.data_ptr(),
    )  # fmt: skip
    return Verdict(Path(path, num_accepted, last_node), output)
