"""vLLM's CPU attention backend with trees: rows that verify a tree take ours, all others vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm_medusa.worker import _tmp_attn
from vllm_medusa.worker.step import TreeStep


@dataclass
class TreeMetadata(CPUAttentionMetadata):
    plain: CPUAttentionMetadata | None = None
    plain_rows: Tensor | None = None
    tree_rows: Tensor | None = None
    items: Any = None


class TreeMetadataBuilder(CPUAttentionMetadataBuilder):
    step: TreeStep | None = None

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        step = self.step
        if step is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        cm = common_attn_metadata
        import numpy as np
        trees = np.nonzero(step.num_nodes > 1)[0]
        plain = np.nonzero(step.num_nodes == 1)[0]
        qsl = cm.query_start_loc.numpy()
        def rows(idx):
            return torch.from_numpy(np.concatenate([np.arange(qsl[i], qsl[i+1]) for i in idx]))
        pm=None; prow=None
        if len(plain):
            lens = qsl[plain+1]-qsl[plain]
            sub_q = torch.from_numpy(np.concatenate([[0], lens.cumsum()]).astype(np.int32))
            pi=torch.from_numpy(plain)
            sub = replace(cm, query_start_loc=sub_q, query_start_loc_cpu=sub_q, seq_lens=cm.seq_lens[pi], num_reqs=len(plain), num_actual_tokens=int(lens.sum()), max_query_len=int(lens.max()), block_table_tensor=cm.block_table_tensor[pi].contiguous(), slot_mapping=cm.slot_mapping)
            pm = super().build(common_prefix_len, sub, fast_build)
            prow = rows(plain)
        items=_tmp_attn.build(cm.block_table_tensor, cm.seq_lens, step.num_nodes, step.tree, self.block_size, trees)
        return TreeMetadata(num_actual_tokens=cm.num_actual_tokens, max_query_len=cm.max_query_len, query_start_loc=cm.query_start_loc, max_seq_len=cm.max_seq_len, seq_lens=cm.seq_lens, block_table=cm.block_table_tensor, slot_mapping=cm.slot_mapping, scheduler_metadata=None, plain=pm, plain_rows=prow, tree_rows=rows(trees), items=items)


class TreeAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls():
        return TreeMetadataBuilder


class TreeAttentionImpl(CPUAttentionBackendImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        md = attn_metadata
        if not isinstance(md, TreeMetadata):
            return super().forward(layer, query, key, value, kv_cache, md, output, output_scale, output_block_scale)
        if md.plain is not None:
            q = query[md.plain_rows]; o = torch.empty_like(q)
            super().forward(layer, q, None, None, kv_cache, md.plain, o)
            output[md.plain_rows] = o
        q = query[md.tree_rows]; o = torch.empty_like(q)
        _tmp_attn.attn(q, kv_cache, md.items, self.scale, self.logits_soft_cap, self.sliding_window, o)
        output[md.tree_rows] = o
        return output


def compact_group(context, group, src, dst):
    move = src != dst
    src, dst = src[move], dst[move]
    if not src.numel():
        return
    for name in group.layer_names:
        kv = context[name].kv_cache
        nb,H,bs,D2=kv.shape; D=D2//2
        v2=kv.view(nb,H,2*bs,D); kc,vc=v2.chunk(2,dim=2)
        kc=kc.as_strided((nb,H,D,bs),(kc.stride(0),kc.stride(1),bs,1))
        sb,so,db,do=src//bs,src%bs,dst//bs,dst%bs
        k=kc[sb,:,:,so].clone(); v=vc[sb,:,so].clone()
        kc[db,:,:,do]=k; vc[db,:,do]=v
