"""The rules of this package in Triton: all requests at once, no host sync.

`target_verdict` is bitwise equal to `greedy_verdict`; `typical_path` computes probabilities, equal
to the torch function's up to rounding. No program waits for another and no sum is atomic, so the
same logits give the same verdict on every rank and in every batch.

Tensors may be strided in all dimensions but the last. This module imports Triton, so import it
late, and only if there is a device to run it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vllm_medusa.sampler import kernel
from vllm_medusa.sampler.path import Path, Verdict, accept_path
from vllm_medusa.tree.batch import TreeBatch

_SPLIT = 8192  # token ids per program in the pass over the vocabulary


def empty_verdict(batch_size: int, max_depth: int, device: torch.device | str) -> Verdict:
    """An uninitialized verdict to write into, for trees no deeper than ``max_depth``."""
    tables = torch.empty(2, batch_size, max_depth + 1, dtype=torch.int64, device=device)
    columns = torch.empty(2, batch_size, dtype=torch.int64, device=device)
    return Verdict(Path(tables[0], *columns), tables[1])


def target_verdict(
    tree: TreeBatch, token_ids: Tensor, target_ids: Tensor, out: Verdict | None = None
) -> Verdict:
    """Keep every draft that is the target's own token at its parent, for greedy and lossless rules.

    ``token_ids`` and ``target_ids`` are int64 [B, N]; ``target_ids`` holds for each node the token
    that plain decoding would emit after it: the argmax for a greedy request. For a sampling
    request, tokens are sampled at all nodes in advance: a sample depends on the node's logits,
    the request's seed and the position, so nodes off the path do not affect it. Greedy
    and sampling requests can be in one batch: the walk is that of `lossless_walk` for both.
    Equals `greedy_verdict` with ``target_ids`` as the argmax.
    """
    batch, nodes = tree.parents.shape
    out = out or empty_verdict(batch, tree.max_depth, token_ids.device)
    assert token_ids.shape == target_ids.shape == (batch, nodes)
    assert out.output_token_ids.shape == out.path.nodes.shape == (batch, tree.max_depth + 1)
    kernel.walk[(batch,)](
        *_strided(token_ids),
        *_strided(target_ids),
        *_strided(tree.parents),
        *_strided(tree.num_nodes),
        *_strided(out.path.nodes),
        *_strided(out.path.num_accepted),
        *_strided(out.path.last_node),
        *_strided(out.output_token_ids),
        tree.max_depth,
        BLOCK_N=_block(nodes),
        num_warps=1,  # a reduction within one warp needs no shared memory
    )
    return out


def typical_path(
    tree: TreeBatch,
    token_ids: Tensor,  # int64 [B, N], negative: no draft
    logits: Tensor,  # fp32, fp16 or bf16 [R, V], after temperature and truncation (-inf)
    row_of_node: Tensor,  # int64 [B, N], each node's row of logits; not read for padding
    epsilon: Tensor,  # fp32 [B]
    delta: Tensor,  # fp32 [B]
) -> Path:
    """The longest path of plausible nodes from logits, which are read once.

    `typical.typical_path` of the probabilities ``logits[row_of_node].softmax(-1)``, up to rounding.
    """
    batch, nodes = tree.parents.shape
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, _SPLIT)
    parts = logits.new_empty((rows, splits, 3), dtype=torch.float32)  # sums over parts of rows
    node_accepted = logits.new_empty((batch, nodes), dtype=torch.bool)
    score = logits.new_empty((batch, nodes), dtype=torch.float32)
    assert token_ids.shape == row_of_node.shape == (batch, nodes)
    assert epsilon.shape == delta.shape == (batch,)
    kernel.vocabulary[(rows, splits)](*_strided(logits), vocab, parts, SPLIT=_SPLIT, num_warps=8)
    kernel.plausible[(batch,)](
        *_strided(token_ids),
        *_strided(logits),
        *_strided(row_of_node),
        parts,
        splits,
        *_strided(epsilon),
        *_strided(delta),
        *_strided(tree.parents),
        *_strided(tree.num_nodes),
        *_strided(node_accepted),
        *_strided(score),
        max(0, tree.max_depth - 1).bit_length(),
        BLOCK_S=_block(splits),
        BLOCK_N=_block(nodes),
        num_warps=8,
    )
    return accept_path(tree, node_accepted, score)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _strided(tensor: Tensor) -> tuple[Tensor | int, ...]:
    """A tensor and its strides, without the last, which is 1."""
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor, *tensor.stride()[:-1]
