"""A layer of the Triton attention for `support.triton_steps`."""

from typing import Any

from support.triton_steps import DIM, HEADS, KV_HEADS
from vllm_medusa.integration.cuda_attention import TreeAttentionImpl


def layer(**changes: Any) -> TreeAttentionImpl:
    options = {
        "num_heads": HEADS, "head_size": DIM, "scale": 0.3, "num_kv_heads": KV_HEADS,
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    return TreeAttentionImpl(**options | changes)
