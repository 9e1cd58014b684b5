"""vLLM's Triton attention backend with trees: steps that verify some take our kernel whole.

A step without trees runs vLLM's own path, to the letter. In a step with trees our kernel attends
for all requests, since it mixes trees, plain decodes and prefill; keys and values are written by
vLLM in either case, and the layout of the cache is vLLM's.

CUDA graphs. vLLM captures full graphs for batches in which every request has as many rows as the
tree has nodes (`AttentionCGSupport.UNIFORM_BATCH`), and captures them before any tree was drafted.
So `build_for_cudagraph_capture` builds a batch of whole trees. All that a replay reads lies where
it lay at capture: vLLM's own buffers (lengths, block table), the tree, and ``is_tree``, which tells
whose rows are nodes and which `build` writes in place. A request that pads a batch has no rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_medusa.kv.layers import LayerCaches
from vllm_medusa.scorer.paged import (
    MAX_HEAD_SIZE,
    PagedBatch,
    SplitWorkspace,
    paged_tree_attention,
    uses_kernel,
)
from vllm_medusa.tree import TreeTensors
from vllm_medusa.worker.options import EngineOptions, is_medusa
from vllm_medusa.worker.step import TreeStep

_LENGTH_STEP = 512  # lengths are rounded up to it: the number of parts is looked up, mostly


@dataclass
class TreeMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step in which some request verifies a tree."""

    paged: PagedBatch | None = None  # never None; vLLM's own fields end with defaults


class TreeMetadataBuilder(TritonAttentionMetadataBuilder):
    """Adds the trees to vLLM's metadata; the runner sets `step` around the build."""

    step: TreeStep | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._trees: _StaticTrees | None = None
        if is_medusa(vllm_config.speculative_config):
            self._trees = _StaticTrees.of(
                vllm_config, kv_cache_spec, self.num_heads_q, torch.device(device)
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs for uniform batches of whole trees; vLLM's own without trees."""
        if is_medusa(vllm_config.speculative_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build vLLM's metadata; with a `step`, for our kernel."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        trees, step = self._trees, self.step
        if trees is None:
            return plain
        if step is None:
            if plain.max_query_len == trees.num_nodes:
                trees.is_tree.zero_()  # a graph of whole trees may be replayed for this batch
            return plain
        torch.gt(step.tree.num_nodes, 1, out=trees.is_tree[: step.batch_size])
        return trees.add_to(plain)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Build what a graph is captured with: whole trees of the shortest context."""
        plain = super().build_for_cudagraph_capture(common_attn_metadata)
        trees = self._trees
        if trees is None or plain.max_query_len != trees.num_nodes:
            return plain
        trees.is_tree.fill_(True)
        return trees.add_to(plain)


@dataclass(frozen=True)
class _Shape:
    """What the kernel's work depends on besides the batch: heads of this rank, and dtypes."""

    num_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    def splits(self, batch: int, max_query_len: int, max_seq_len: int) -> int:
        """Into how many parts the keys best go."""
        return _splits(self, batch, max_query_len, -(-max_seq_len // _LENGTH_STEP) * _LENGTH_STEP)


@functools.lru_cache(4096)
def _splits(shape: _Shape, batch: int, max_query_len: int, max_seq_len: int) -> int:
    if not uses_kernel(shape.device.type):
        return 1
    from vllm_medusa.scorer.launch import choose_splits

    return choose_splits(
        batch,
        shape.num_heads,
        shape.kv_heads,
        shape.head_size,
        max_query_len,
        max_seq_len,
        shape.dtype,
        shape.kv_dtype,
        shape.device,
    )


@dataclass(frozen=True, eq=False)
class _StaticTrees:
    """What all steps of one KV cache group share, on the device and in one place for good."""

    tensors: TreeTensors
    is_tree: Tensor  # bool [most requests of a step]
    workspace: SplitWorkspace | None  # None: no step has its keys split
    shape: _Shape

    @classmethod
    def of(cls, vllm_config: Any, spec: Any, num_heads: int, device: torch.device) -> _StaticTrees:
        """Make the buffers; the workspace is as large as the largest step of whole trees needs."""
        tensors = TreeTensors.from_tree(EngineOptions.of(vllm_config).tree, device)
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        shape = _Shape(
            num_heads, spec.num_kv_heads, spec.head_size, model.dtype, spec.dtype, device
        )
        most = 0
        for batch in range(1, scheduler.max_num_seqs + 1):
            splits = shape.splits(batch, tensors.num_nodes, model.max_model_len)
            if splits > 1:
                most = max(most, batch * tensors.num_nodes * num_heads * splits)
        workspace = SplitWorkspace.allocate(most, spec.head_size, device) if most else None
        with torch.inference_mode(False):  # else only inference mode could write to it
            is_tree = torch.zeros(scheduler.max_num_seqs, dtype=torch.bool, device=device)
        return cls(tensors, is_tree, workspace, shape)

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.tensors.num_nodes

    def add_to(self, plain: TritonAttentionMetadata) -> TreeMetadata:
        """The metadata with the trees; ``is_tree`` is written, before or after."""
        batch = plain.seq_lens.shape[0]  # padding included
        splits = 1
        if self.workspace is not None:  # prefill may have more rows than it has room for
            room = self.workspace.max_splits(
                plain.num_actual_tokens, self.shape.num_heads, self.shape.head_size
            )
            wanted = self.shape.splits(batch, plain.max_query_len, plain.max_seq_len)
            splits = min(wanted, room)
        paged = PagedBatch(
            cu_query_lens=plain.query_start_loc,
            seq_lens=plain.seq_lens,
            block_table=plain.block_table[:batch],
            is_tree=self.is_tree[:batch],
            ancestor_bits=self.tensors.ancestor_bits.expand(batch, -1, -1),
            depths=self.tensors.depths.expand(batch, -1),
            max_query_len=plain.max_query_len,
            num_splits=splits,
            workspace=self.workspace,
        )
        return TreeMetadata(**vars(plain), paged=paged)


class TreeAttentionBackend(TritonAttentionBackend):
    """Stands in for ``TRITON_ATTN``, less what trees can't have."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """Layers of this backend."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        """Builder of its metadata."""
        return TreeMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Both kernels' sizes."""
        return super().supports_head_size(head_size) and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and later, which the tiles are made for."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No: nodes see nothing that comes later."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """No: a window that spares the prompt is unknown to our kernel."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No ALiBi of any kind."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        """Why these can't go together, or None."""
        plain = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        if plain.get(kv_cache_dtype, dtype) != dtype:
            return (
                f"tree attention reads a cache of the model's own {dtype} or of fp8, not "
                f"{kv_cache_dtype}"
            )
        return None


class TreeAttentionImpl(TritonAttentionImpl):
    """One attention layer."""

    group_caches: tuple[Tensor, list[LayerCaches]] | None = None  # see `_group_caches`

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        reasons = {
            "ALiBi": self.alibi_slopes is not None,
            "chunked attention": self.chunk_lookback >= 0,
            f"{AttentionType(self.attn_type).value} attention": self.attn_type
            != AttentionType.DECODER,
        }
        for reason, found in reasons.items():
            if found:
                raise NotImplementedError(
                    f"This model uses {reason}, which tree attention does not support. Leave "
                    "method='medusa' out."
                )
        self.supports_quant_query_input = False  # our kernel multiplies in the model's own dtype

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: outputs are written in the dtype of the queries."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend: query [T, Hq, D] over ``kv_cache``, which holds this step's keys already."""
        if not isinstance(attn_metadata, TreeMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        assert output_scale is None and output_block_scale is None and attn_metadata.paged
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        k_scale = v_scale = None
        if is_quantized_kv_cache(self.kv_cache_dtype):
            keys, values = keys.view(self.fp8_dtype), values.view(self.fp8_dtype)
            k_scale, v_scale = layer._k_scale, layer._v_scale
        rows = attn_metadata.num_actual_tokens
        left = self.sliding_window[0]
        paged_tree_attention(
            query[:rows],
            keys,
            values,
            attn_metadata.paged,
            self.scale,
            out=output[:rows],
            softcap=self.logits_soft_cap,
            window=left + 1 if left >= 0 else None,
            sinks=self.sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return output


def compact_group(
    layers: Mapping[str, Any],
    layer_names: list[str],
    slots: Tensor,  # int64 [B, N], of every node
    path_nodes: Tensor,  # int64 [B, D + 1]
    num_accepted: Tensor,  # int64 [B]
) -> None:
    """Move the accepted paths to contiguous slots in every layer of a KV cache group.

    One launch for all layers of one form; nothing waits for the device.
    """
    if uses_kernel(slots.device.type):
        from vllm_medusa.kv.kernel import compact_layers
    else:
        from vllm_medusa.kv.layers import compact_layers
    for caches in _group_caches(layers, layer_names):
        compact_layers(caches, slots, path_nodes, num_accepted)


def _group_caches(layers: Mapping[str, Any], layer_names: list[str]) -> list[LayerCaches]:
    """The caches of a group by their form; described once and kept by the first layer."""
    first = layers[layer_names[0]]
    known: tuple[Tensor, list[LayerCaches]] | None = first.impl.group_caches
    if known is None or known[0] is not first.kv_cache:  # vLLM has bound others since
        caches = [layers[name].kv_cache for name in layer_names]
        known = first.impl.group_caches = (first.kv_cache, _describe(caches))
    return known[1]


def _describe(caches: list[Tensor]) -> list[LayerCaches]:
    """The caches [num_blocks, heads, block_size, 2 * head_size], each once, by their form."""
    forms: dict[Any, dict[int, Tensor]] = {}
    for cache in caches:
        form = cache.shape, cache.stride(), cache.dtype, cache.device
        forms.setdefault(form, {})[cache.data_ptr()] = cache
    return [LayerCaches.of(list(same.values()), (0, 2)) for same in forms.values()]
