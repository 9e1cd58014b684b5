"""Start-up checks that refuse configurations that would give wrong results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration import compat
from vllm_medusa.integration.startup.eagle_options import unsupported_by_eagle
from vllm_medusa.integration.startup.options import (
    ASYNC_SCHEDULER,
    EITHER_SCHEDULER,
    SCHEDULER,
    TreeSettings,
    is_eagle,
    is_for_v2,
)


def check_engine(vllm_config: Any) -> None:
    """Refuse unsupported configurations; called on the finished config, before weights load.

    Raises MedusaConfigError: with all reasons, not only the first.
    """
    options = TreeSettings.of(vllm_config)
    on_v2 = is_for_v2(vllm_config.speculative_config)
    reasons = [
        *_unsupported(vllm_config),
        *(_unsupported_on_v2(vllm_config) if on_v2 else _unsupported_on_v1(vllm_config)),
        *_without_budget(vllm_config, options),
        *_too_small(vllm_config, options),
        *(unsupported_by_eagle(vllm_config) if is_eagle(vllm_config.speculative_config) else ()),
    ]
    if reasons:
        raise MedusaConfigError(
            "Medusa can't run with this configuration:\n- " + "\n- ".join(reasons)
        )


def check_layers(layers: Mapping[str, Any], kv_cache_config: Any) -> None:
    """Refuse attention layers whose backend does not support trees.

    This includes backends that vLLM derives from ours with a different view of the requests. The
    layers of all groups of vLLM's ``kv_cache_config`` are checked.

    Raises MedusaConfigError: with the first such layer and its backend.
    """
    for name in (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names):
        backend = layers[name].get_attn_backend()
        if "step" not in vars(backend.get_builder_cls()):  # receives a step's trees
            raise MedusaConfigError(
                f"The attention of {name} is {backend.__name__}, which the model selects itself "
                "and which does not support trees: it would treat a tree's nodes as a chain. Omit "
                "method='medusa'."
            )


def _unsupported(config: Any) -> Iterator[str]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: the accepted path is "
            "known on the last stage only. Use 1 (tensor parallelism works across ranks)."
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism splits the KV cache, but tree attention needs all of it. Use 1."
    if config.kv_transfer_config is not None:
        yield (
            "a KV connector (kv_transfer_config) would save blocks before the accepted path is "
            "compacted. Remove it."
        )
    if config.ec_transfer_config is not None:
        yield "an encoder-cache connector (ec_transfer_config) is untested. Remove it."
    if model.use_mla and (compat.on_cuda() or is_for_v2(config.speculative_config)):
        yield (
            f"{model.model} uses MLA, whose latent KV cache tree attention supports only on CPUs, "
            "with vLLM's V1 model runner. Omit method='medusa'."
        )
    if model.use_mla and hasattr(model.hf_text_config, "index_topk"):
        yield (
            f"{model.model} uses sparse MLA (index_topk), which trees do not support. Omit "
            "method='medusa'."
        )
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        yield (
            f"{model.model} keeps recurrent state (hybrid or state-space layers), which can't "
            "be rolled back to the accepted path."
        )
    if model.is_encoder_decoder:
        yield f"{model.model} is an encoder-decoder model, whose cross-attention can't use trees."
    if model.runner_type != "generate":
        yield f"the runner is {model.runner_type!r}; speculation needs a generative model."
    if model.is_mm_prefix_lm:
        yield f"{model.model} attends to images bidirectionally, which trees do not support yet."
    if model.attention_chunk_size is not None:
        yield (
            f"{model.model} attends in chunks of {model.attention_chunk_size} tokens "
            "(attention_chunk_size), which tree attention does not support. Omit method='medusa'."
        )
    readable = ["auto", "bfloat16", "float16"]
    readable += ["fp8", "fp8_e4m3"] if compat.on_cuda() else ["float32"]
    if cache.cache_dtype not in readable:
        yield (
            f"kv_cache_dtype is {cache.cache_dtype!r}; tree attention on this platform supports "
            f"{', '.join(readable)}."
        )
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill skips rows that a tree needs. Disable it."


def _unsupported_on_v1(config: Any) -> Iterator[str]:
    if config.use_v2_model_runner:
        yield (
            "a feature requires vLLM's V2 model runner, but V1 was selected. Set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or omit the feature."
        )


def _unsupported_on_v2(config: Any) -> Iterator[str]:
    model = config.model_config
    if not config.use_v2_model_runner:
        yield (
            "vLLM fell back to its V1 model runner after V2 was selected. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or omit the feature that caused this."
        )
    if model.uses_mrope:
        yield (
            f"{model.model} uses multi-dimensional RoPE, whose positions vLLM's V2 model runner "
            "does not expose. Set VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if config.parallel_config.use_ubatching:
        yield (
            "microbatches (enable_dbo) split a step, but its trees are laid out as a whole. "
            "Disable them."
        )
    if config.watermark_config is not None:
        yield "watermarks (watermark_config) are only supported along chains. Remove them."
    if model.logits_processors:
        yield "custom logits processors are not supported with speculation. Remove them."
    if config.parallel_config.enable_batch_sharded_sampling:
        yield (
            "batch-sharded sampling (enable_batch_sharded_sampling) gives each rank other requests "
            "to verify, but all ranks need all paths. Disable it."
        )
    if model.return_sampling_mask:
        yield "return_sampling_mask only supports chains. Disable it."
    if model.enable_trace_replay:
        yield "enable_trace_replay only supports chains. Disable it."


def _without_budget(config: Any, options: TreeSettings) -> Iterator[str]:
    """Refuse a user's scheduler that can't choose the number of nodes of dynamic trees."""
    chosen, ahead = config.scheduler_config.scheduler_cls, config.scheduler_config.async_scheduling
    ours, remedy = SCHEDULER, 'use a static "tree"'
    if ahead:
        ours, remedy = ASYNC_SCHEDULER, "disable asynchronous scheduling (--no-async-scheduling)"
    if options.budget is None or chosen == EITHER_SCHEDULER or compat.derives_from(chosen, ours):
        return
    yield (
        f"scheduler_cls is {chosen!r}, which has no budget for dynamic trees. Omit scheduler_cls, "
        f"derive yours from {ours}, or {remedy}."
    )


def _too_small(config: Any, options: TreeSettings) -> Iterator[str]:
    """Refuse steps that are too small for a static tree; warn if they may be."""
    if options.budget is not None:  # dynamic trees adapt to the available rows
        return
    nodes, scheduler = options.tree.num_nodes, config.scheduler_config
    tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    seqs = scheduler.max_num_seqs
    if tokens < nodes:
        yield (
            f"the tree has {nodes} nodes (root included), but a step schedules at most {tokens} "
            "tokens, so no tree would ever fit. Raise max_num_batched_tokens (best: max_num_seqs "
            f"x {nodes} = {seqs * nodes}) or cap the tree with num_speculative_tokens."
        )
    elif seqs * nodes > tokens:
        compat.logger.warning_once(
            f"{seqs} running requests with trees of {nodes} nodes (root included) need "
            f"{seqs * nodes} tokens per step, but a step schedules at most {tokens}: trees are "
            "then truncated, and new requests wait. Raise max_num_batched_tokens to "
            f"{seqs * nodes} or more, lower max_num_seqs to {tokens // nodes}, or cap the tree "
            "with num_speculative_tokens."
        )
