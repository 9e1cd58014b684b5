"""Steps in the layout of vLLM's runner, for the Triton attention's metadata builder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from support.models import COMMON
from vllm_medusa.integration.attention.cuda_attention import TreeAttentionImpl
from vllm_medusa.integration.attention.cuda_metadata import TreeMetadata, TreeMetadataBuilder
from vllm_medusa.scorer.paged import PagedBatch
from vllm_medusa.scorer.step import Trees as TreesOf
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
NODES = TREE.num_nodes  # 7
MAX_SEQS, BLOCK, DIM = 6, 16, 32
HEADS, KV_HEADS = COMMON["num_attention_heads"], COMMON["num_key_value_heads"]


def make_config(target: str, heads: str | None, budget: Any = None, **more: Any) -> Any:
    """An engine's config; with ``heads``, for `TREE`, or for dynamic trees with a budget."""
    speculative = {"method": "medusa", "model": heads, "tree": TREE.to_lists()}
    if budget is not None:
        speculative = {"method": "medusa", "model": heads, "budget": budget, **more}
    return EngineArgs(
        target,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=MAX_SEQS,
        max_model_len=512,
        speculative_config=speculative if heads else None,
    ).create_engine_config()


def layer(**changes: Any) -> TreeAttentionImpl:
    options = {
        "num_heads": HEADS, "head_size": DIM, "scale": 0.3, "num_kv_heads": KV_HEADS,
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    return TreeAttentionImpl(**options | changes)


def make_builder(config: Any) -> TreeMetadataBuilder:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
    )
    return TreeMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


class Buffers:
    """The runner's buffers, updated in place from step to step."""

    def __init__(self) -> None:
        self.query_start_loc = torch.zeros(MAX_SEQS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(MAX_SEQS, dtype=torch.int32)
        self.block_table = torch.arange(MAX_SEQS * 8, dtype=torch.int32).view(MAX_SEQS, 8)
        self.slot_mapping = torch.zeros(200, dtype=torch.int64)

    def batch(self, requests: list[tuple[int, int]], padded: int = 0) -> CommonAttentionMetadata:
        """Requests of (rows, context), padded to ``padded`` requests of the max number of rows."""
        count, rows = len(requests), [rows for rows, _ in requests]
        padded = max(padded, count)
        total = sum(rows)
        ends = np.cumsum(rows).tolist() + [total] * (padded - count)
        self.query_start_loc[: padded + 1] = torch.tensor([0, *ends], dtype=torch.int32)
        self.seq_lens[:count] = torch.tensor([sum(r) for r in requests], dtype=torch.int32)
        self.seq_lens[count:] = 0
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: padded + 1],
            query_start_loc_cpu=self.query_start_loc[: padded + 1].clone(),
            seq_lens=self.seq_lens[:padded],
            num_reqs=padded,
            num_actual_tokens=total if padded == count else padded * max(rows),
            max_query_len=max(rows),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.block_table[:padded],
            slot_mapping=self.slot_mapping,
        )


def step_of(num_nodes: list[int], trees: TreesOf | None = None) -> TreeStep:
    """A step of requests with given node counts, of `TREE` by default."""
    total, sizes = sum(num_nodes), np.array(num_nodes, dtype=np.int64)
    return TreeStep.build(
        trees or TreeTensors.from_tree(TREE).batch,
        sizes,
        torch.from_numpy(np.concatenate(([0], sizes.cumsum()))),
        torch.arange(total),
        torch.zeros(total, dtype=torch.int32),
    )


def build(
    builder: TreeMetadataBuilder,
    common: CommonAttentionMetadata,
    num_nodes: list[int] | None,
    trees: TreesOf | None = None,
) -> TritonAttentionMetadata:
    """As in `TreeModelState`."""
    builder.step = None if num_nodes is None else step_of(num_nodes, trees)
    try:
        return builder.build(0, common)
    finally:
        builder.step = None


def paged(metadata: TritonAttentionMetadata) -> PagedBatch:
    assert isinstance(metadata, TreeMetadata)
    assert metadata.paged is not None
    return metadata.paged
