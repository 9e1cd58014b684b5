"""KV compaction: accepted nodes -> slot moves, and the copy. Knows no token."""

from vllm_medusa.kv.compaction import accepted_moves, copy_slots

__all__ = ["accepted_moves", "copy_slots"]
