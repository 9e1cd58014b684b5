"""Capture sizes of CUDA graphs for batches of requests with whole trees.

By default vLLM captures steps of up to 512 tokens, such as 8 requests with trees of 64 nodes;
larger steps launch kernels one by one. Here whole trees of more requests are added to its sizes:
every count up to 16, then eight per doubling, so that at most an eighth of a step is
padding. From `MAX_TOKENS` on, the device has enough work to hide the launches.
"""

from __future__ import annotations

from typing import Any

from vllm_medusa.integration.compat import logger

MAX_TOKENS = 2048


def tree_sizes(num_nodes: int, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Token counts to capture, ascending: multiples of ``num_nodes``, root included."""
    maximum = min(max_num_seqs, min(max_num_tokens, MAX_TOKENS) // num_nodes)
    return [
        count * num_nodes
        for count in range(1, maximum + 1)
        if count <= 16 or count == maximum or count % 2 ** (count.bit_length() - 4) == 0
    ]


def capture_more_trees(engine_args: Any, config: Any, num_nodes: int) -> None:
    """Add `tree_sizes` to the capture sizes of a finished config, unless the user set them."""
    compilation, scheduler = config.compilation_config, config.scheduler_config
    if not compilation.cudagraph_capture_sizes:  # no graphs
        return
    user_settings = (
        chosen
        for source in (engine_args, engine_args.compilation_config)
        for chosen in (source.cudagraph_capture_sizes, source.max_cudagraph_capture_size)
    )
    if all(chosen is None for chosen in user_settings):
        own = tree_sizes(num_nodes, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        sizes = sorted({*compilation.cudagraph_capture_sizes, *own})
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = sizes[-1]
    maximum = min(scheduler.max_num_seqs, compilation.max_cudagraph_capture_size // num_nodes)
    logger.info(
        "CUDA graphs cover steps of up to %d requests with whole trees of %d nodes; larger steps "
        "launch kernels one by one. --max-cudagraph-capture-size (in tokens) changes this.",
        maximum,
        num_nodes,
    )
