"""KV compaction: which slots of accepted nodes move, and the copy. Independent of tokens."""

from vllm_medusa.kv.compaction import accepted_moves, copy_slots
from vllm_medusa.kv.layers import LayerCaches, compact_layers

__all__ = ["LayerCaches", "accepted_moves", "compact_layers", "copy_slots"]
