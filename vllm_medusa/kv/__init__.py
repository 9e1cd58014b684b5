"""KV compaction: which slots of accepted nodes move, and the copy. Independent of tokens."""

from vllm_medusa.kv.compaction import accepted_moves, copy_slots

__all__ = ["accepted_moves", "copy_slots"]
