"""Acceptance: logits at the nodes -> verdict (accepted path, emitted tokens).

Batched tensors in and out; independent of the proposal and the KV cache.

To add a rule: a module here from a `TreeBatch` and logits to a `Path` or `Verdict` (for CUDA also
in `dispatch`, `launch` and `kernel`); its option, `config.AcceptanceConfig`; the requests that use
it, `worker.requests.RequestOptions`; and its callers: V1's `worker.v1.verification`, V2's
`worker.v2.sampler` (and `cuda_warmup`), `decode`.
"""

from vllm_medusa.sampler.draw import Draw, draw_exponential, draw_splitmix, truncate_logits
from vllm_medusa.sampler.greedy import greedy_verdict
from vllm_medusa.sampler.lossless import NodeSampler, lossless_walk
from vllm_medusa.sampler.path import (
    NO_TOKEN,
    Path,
    Verdict,
    accept_path,
    close_path,
    path_to_node,
    select_verdict,
)
from vllm_medusa.sampler.typical import typical_path, typical_threshold

__all__ = [
    "NO_TOKEN",
    "Draw",
    "NodeSampler",
    "Path",
    "Verdict",
    "accept_path",
    "close_path",
    "draw_exponential",
    "draw_splitmix",
    "greedy_verdict",
    "lossless_walk",
    "path_to_node",
    "select_verdict",
    "truncate_logits",
    "typical_path",
    "typical_threshold",
]
