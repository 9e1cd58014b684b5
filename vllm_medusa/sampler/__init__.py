"""Acceptance: logits at the nodes -> verdict (accepted path, emitted tokens).

Batched tensors in and out; independent of the proposal and the KV cache. How to add a rule: see
CONTRIBUTING.md.
"""

from vllm_medusa.sampler.draw import Draw, draw_exponential, draw_splitmix, truncate_logits
from vllm_medusa.sampler.greedy import greedy_verdict, greedy_walk
from vllm_medusa.sampler.lossless import lossless_walk
from vllm_medusa.sampler.path import (
    NO_TOKEN,
    Path,
    Verdict,
    accept_path,
    close_path,
    combine,
    path_to_node,
    select_verdict,
)
from vllm_medusa.sampler.typical import typical_path

__all__ = [
    "NO_TOKEN",
    "Draw",
    "Path",
    "Verdict",
    "accept_path",
    "close_path",
    "combine",
    "draw_exponential",
    "draw_splitmix",
    "greedy_verdict",
    "greedy_walk",
    "lossless_walk",
    "path_to_node",
    "select_verdict",
    "truncate_logits",
    "typical_path",
]
