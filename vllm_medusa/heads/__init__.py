"""The Medusa heads and their checkpoints."""

from vllm_medusa.heads.checkpoint import load_heads, peek_heads, save_heads
from vllm_medusa.heads.info import HeadsInfo
from vllm_medusa.heads.model import HeadsError, LMHead, MedusaHeads, ResBlock
from vllm_medusa.heads.packed import Linear, MakeLinear, PackedHeads

__all__ = [
    "HeadsError",
    "HeadsInfo",
    "LMHead",
    "Linear",
    "MakeLinear",
    "MedusaHeads",
    "PackedHeads",
    "ResBlock",
    "load_heads",
    "peek_heads",
    "save_heads",
]
