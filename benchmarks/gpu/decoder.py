"""Greedy decoding in fixed memory: a step is one function without arguments, so one graph.

A tree step drafts after verifying: it verifies the tree that the previous step left in ``tokens``:

    score     all nodes of all requests in one forward pass, keys and values in slot base + i
    verify    the walk, then compaction of the accepted path's keys and values
    propose   the next tree from the hidden state of the last accepted node

A plain step is the same with only a root, without heads. Nothing in a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.model import Target, views
from vllm_medusa.kv.kernel import LayerCaches
from vllm_medusa.proposer.build import of_pool
from vllm_medusa.proposer.choices import read_choices
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.presets import load_preset
from vllm_medusa.tree.topology import TokenTree

BLOCK_SIZE = 16  # tokens per cache block
HeadLogits = Callable[[Tensor], Tensor]  # hidden [B, H] -> [B, heads, V]


def step_tree(nodes: int) -> TokenTree:
    """A tree of ``nodes`` nodes for five heads: the best choices, then a published tree's paths."""
    chain = [(0,) * depth for depth in range(1, 6)]
    paths = [*chain, *(p for p in load_preset("vicuna_7b_stage2").paths if p not in chain)]
    return TokenTree.from_paths(paths[: nodes - 1]) if nodes > 1 else TokenTree(())


def step_batch(
    tree: TreeTensors,
    seq_lens: Tensor,  # int32 [B]
    block_table: Tensor,  # int32 [B, max_blocks]
    *,
    chunk: int = 0,
    num_splits: int = 1,
    workspace: SplitWorkspace | None = None,
) -> PagedBatch:
    """All requests have a tree, except the last one if ``chunk`` is set: rows of a prompt."""
    count, nodes, device = len(seq_lens), tree.num_nodes, seq_lens.device
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * nodes
    is_tree = torch.full((count,), nodes > 1, device=device)
    if chunk:
        starts[-1] += chunk - nodes
        is_tree[-1] = False
    return PagedBatch(
        cu_query_lens=starts,
        seq_lens=seq_lens,
        block_table=block_table,
        is_tree=is_tree,
        ancestor_bits=tree.ancestor_bits.expand(count, -1, -1),
        depths=tree.depths.expand(count, -1),
        max_query_len=max(nodes, chunk),
        num_splits=num_splits,
        workspace=workspace,
    )


def choose_parts(query: Tensor, key_cache: Tensor, batch: int, nodes: int, length: int) -> int:
    """Number of key parts of a step.

    ``query`` is [T, Hq, D], ``key_cache`` [num_blocks, block_size, Hkv, D].
    """
    from vllm_medusa.scorer.launch import choose_splits

    heads = (query.shape[1], key_cache.shape[2], query.shape[2])
    return choose_splits(batch, *heads, nodes, length, query.dtype, key_cache.dtype, query.device)


class Decoder:
    """The state of B requests and one step of all of them.

    With ``planted`` tokens and targets, every step gets the same batch and accepts the same path,
    so it can be repeated for timing: lengths do not change, and proposals are discarded.
    """

    def __init__(
        self,
        target: Target,
        contexts: list[int],  # tokens of each request in the cache
        capacity: int,  # max tokens per request, this step's nodes included
        tree: TokenTree | None = None,
        head_logits: HeadLogits | None = None,
        *,
        planted: bool = False,
    ) -> None:
        device, count = target.device, len(contexts)
        self.target = target
        self.planted = planted
        self.head_logits = head_logits
        self.is_tree = tree is not None
        self.tree = TreeTensors.from_tree(tree or TokenTree(()), device)
        self.nodes = nodes = self.tree.num_nodes
        sizes = torch.full((count,), nodes, device=device)
        self.trees = TreeBatch.from_static(self.tree, sizes)
        self.base = torch.tensor(contexts, device=device)  # int64 [B]
        self.tokens = torch.zeros(count, nodes, dtype=torch.int64, device=device)
        self.proposals = torch.zeros_like(self.tokens)
        self.targets: Tensor | None = None  # int64 [B, N], planted verdicts
        width = -(-capacity // (16 * BLOCK_SIZE)) * 16
        ids = torch.randperm(count * width, generator=torch.Generator().manual_seed(0))
        self.table = ids.view(count, width).to(device)  # int64 [B, blocks]
        self.caches = target.new_caches(count * width, BLOCK_SIZE)
        self.layers = LayerCaches.of(self.caches)
        self.batch = self._batch(capacity)
        if self.is_tree:
            from vllm_medusa.sampler.launch import empty_verdict

            self.verdict = empty_verdict(count, self.tree.max_depth, device)
            if planted:
                self.tokens[:], self.targets = plant(self.tree, count, target.shape.vocab)

    def _batch(self, capacity: int) -> PagedBatch:
        shape, count = self.target.shape, len(self.base)
        query = torch.empty(
            0, shape.heads, shape.head_size, dtype=self.target.dtype, device=self.target.device
        )
        splits = choose_parts(query, views(self.caches[0])[0], count, self.nodes, capacity)
        space = None
        if splits > 1:
            rows = count * self.nodes * shape.heads * splits
            space = SplitWorkspace.allocate(rows, shape.head_size, self.target.device)
        lens = (self.base + self.nodes).int()
        table = self.table.int()
        return step_batch(self.tree, lens, table, num_splits=splits, workspace=space)

    def prefill(self, request: int, prompt: list[int]) -> Tensor:
        """Score a prompt except its last token, the new root; returns hidden states [T, H].

        A prompt has at least two tokens and is processed in one chunk: for a few hundred tokens.
        """
        device = self.target.device
        rows = torch.arange(len(prompt) - 1, device=device)
        tree = TreeTensors.from_tree(TokenTree(()), device)
        batch = PagedBatch(
            cu_query_lens=torch.tensor([0, len(rows)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([len(rows)], dtype=torch.int32, device=device),
            block_table=self.table[request : request + 1].int(),
            is_tree=torch.zeros(1, dtype=torch.bool, device=device),
            ancestor_bits=tree.ancestor_bits.unsqueeze(0),
            depths=tree.depths.unsqueeze(0),
            max_query_len=len(rows),
        )
        slots = self.table[request, rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE
        tokens = torch.tensor(prompt, device=device)
        hidden = self.target.forward(tokens[:-1], rows, slots, self.caches, batch)
        self.base[request] = len(rows)
        self.tokens[request, 0] = tokens[-1]
        if self.is_tree:
            self._draft(hidden[-1:], self.proposals[request : request + 1])
            self.tokens[request, 1:] = self.proposals[request, 1:]
        return hidden

    def step(self) -> None:
        """Everything, from nodes to the next nodes."""
        self.score()
        if self.is_tree:
            self.verify()
            self.propose()
        elif not self.planted:
            self.tokens[:, 0] = self.chosen[:, 0]
            self.base += 1

    def score(self) -> None:
        """The forward pass, logits and the target's choice at every node."""
        positions = self.base.unsqueeze(1) + self.tree.depths  # [B, N]
        index = self.base.unsqueeze(1) + torch.arange(self.nodes, device=self.base.device)
        block = self.table.gather(1, index // BLOCK_SIZE)
        self.slots = block * BLOCK_SIZE + index % BLOCK_SIZE  # [B, N]
        self.batch.seq_lens.copy_(self.base + self.nodes)
        self.hidden = self.target.forward(
            self.tokens.flatten(),
            positions.flatten(),
            self.slots.flatten(),
            self.caches,
            self.batch,
        )
        self.logits = self.target.logits(self.hidden)  # [B * N, V]
        self.chosen = self.logits.argmax(-1).view_as(self.tokens)  # [B, N]

    def verify(self) -> None:
        """Walk and compact."""
        from vllm_medusa.kv.kernel import compact_layers
        from vllm_medusa.sampler.launch import target_verdict

        chosen = self.chosen if self.targets is None else self.targets
        target_verdict(self.trees, self.tokens, chosen, out=self.verdict)
        path = self.verdict.path
        compact_layers(self.layers, self.slots, path.nodes, path.num_accepted)

    def propose(self) -> None:
        """The next tree; its root is the final token."""
        path = self.verdict.path
        rows = torch.arange(len(self.base), device=self.base.device) * self.nodes + path.last_node
        self._draft(self.hidden[rows], self.proposals)
        if self.planted:
            return
        self.tokens.copy_(self.proposals)
        self.tokens[:, 0] = self.verdict.final_token
        self.base += path.num_accepted + 1

    def _draft(self, hidden: Tensor, out: Tensor) -> None:
        """Fill trees, int64 [B, N], from hidden states [B, H]."""
        assert self.head_logits is not None, "a tree needs heads"
        logits = self.head_logits(hidden)[:, : self.tree.max_depth]
        out.copy_(of_pool(read_choices(logits, self.tree.width), self.tree).token_ids)

    def attention(self, qkv: Tensor) -> None:
        """Only every layer's attention, for timing."""
        for cache in self.caches:
            self.target.attend(qkv, cache, self.batch)

    def emitted(self) -> list[list[int]]:
        """The tokens emitted in the last step, per request; waits for the device."""
        if not self.is_tree:
            return [[int(token)] for token in self.chosen[:, 0].tolist()]
        table = self.verdict.output_token_ids.tolist()
        return [[token for token in row if token >= 0] for row in table]


def plant(tree: TreeTensors, count: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [B, N], for which the walk takes the path with the most moves."""
    parents = tree.parents.tolist()
    depths = tree.depths.tolist()
    deepest = [node for node in range(tree.num_nodes) if depths[node] == max(depths)]
    tokens = torch.arange(tree.num_nodes, device=tree.parents.device)
    targets = torch.full_like(tokens, vocab - 1)
    node = max(deepest)
    while node > 0:
        targets[parents[node]] = node
        node = parents[node]
    return tokens.expand(count, -1), targets.expand(count, -1).contiguous()
