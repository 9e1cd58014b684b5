"""KV compaction: moves the KV of accepted nodes to the slots that plain decoding would use.

`compaction` is in torch, for `decode.py` and MLA on CPUs; engines use `cpu` (C++) and `kernel`
(Triton). Independent of tokens.
"""

from vllm_medusa.kv.compaction import accepted_moves, copy_slots

__all__ = ["accepted_moves", "copy_slots"]
