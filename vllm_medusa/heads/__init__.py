"""The Medusa heads and their checkpoints."""

from vllm_medusa.heads.checkpoint import load_heads, peek_heads, save_heads
from vllm_medusa.heads.info import HeadsInfo
from vllm_medusa.heads.model import HeadsError, LMHead, MedusaHeads, ResBlock

__all__ = [
    "HeadsError",
    "HeadsInfo",
    "LMHead",
    "MedusaHeads",
    "ResBlock",
    "load_heads",
    "peek_heads",
    "save_heads",
]
