"""Are the other kernels right on this GPU? Each against the torch rule of the same name.

Walk, path, proposal and compaction must give the same bits. Typical acceptance computes
probabilities too: a request whose verdict differs passes only if one of its nodes lies within 1e-5
of its bar, where rounding decides.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Lab, Record
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.packing import dense_ancestors, pack_ancestors
from vllm_medusa.tree.topology import TokenTree

SIZES = (1, 16, 64, 65, 128, 256)
NEAR = 1e-5


def cases(small: bool) -> list[Case]:
    """One case for each kernel and size."""
    sizes, batch, vocab = ((9,), 3, 300) if small else (SIZES, 32, 32000)
    found = []
    for nodes in sizes:
        found.append(Case(f"walk, {nodes} nodes", partial(walk, nodes, batch)))
        found.append(Case(f"path by score, {nodes} nodes", partial(path, nodes, batch)))
        found.append(Case(f"typical, {nodes} nodes", partial(typical, nodes, min(batch, 8), vocab)))
    dtypes = (torch.bfloat16,) if small else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        for size in (vocab,) if small else (vocab, 128256):
            name = f"proposal, {size} tokens {dtype}"
            found.append(Case(name, partial(proposal, size, batch, dtype)))
    widths = (torch.uint8,) if small else (torch.uint8, torch.bfloat16, torch.float32)
    for dtype in widths:
        found += [
            Case(f"compaction, {layout} {dtype}", partial(compaction, layout, dtype, small))
            for layout in ("heads first", "tokens first")
        ]
    return found


def random_trees(batch: int, nodes: int, seed: int) -> tuple[TreeBatch, Tensor]:
    """Ragged trees on the CPU, and token ids int64 [B, N] with many siblings alike."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [rng.randint(1, nodes) for _ in range(batch - 1)] + [nodes]
    parents = torch.full((batch, nodes), -1)
    for b, size in enumerate(sizes):
        for node in range(1, size):
            parents[b, node] = rng.randint(max(0, node - 7), node - 1)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        above = depths.gather(1, parents[:, node : node + 1].clamp(min=0))[:, 0] + 1
        depths[:, node] = torch.where(parents[:, node] >= 0, above, 0)
    ancestors = dense_ancestors(parents)
    tree = TreeBatch(
        num_nodes=torch.tensor(sizes),
        parents=parents,
        depths=depths,
        ancestor_bits=pack_ancestors(ancestors),
        ancestors=ancestors,
        max_depth=int(depths.max()),
    )
    return tree, torch.randint(0, 3, (batch, nodes), generator=generator)


def moved(tree: TreeBatch, device: str) -> TreeBatch:
    """The trees on a device."""
    tensors = {k: v.to(device) for k, v in vars(tree).items() if isinstance(v, Tensor)}
    return TreeBatch(max_depth=tree.max_depth, **tensors)


def walk(nodes: int, batch: int, lab: Lab) -> Record:
    """`target_verdict` against `greedy_verdict`; a changed target must change a verdict."""
    from vllm_medusa.sampler import greedy_verdict, launch

    tree, tokens = random_trees(batch, nodes, nodes)
    targets = torch.randint(0, 3, tokens.shape, generator=torch.Generator().manual_seed(1))
    expected = greedy_verdict(tree, tokens, targets)
    arguments = (moved(tree, lab.device), tokens.to(lab.device))
    verdict = launch.target_verdict(*arguments, targets.to(lab.device))
    other = launch.target_verdict(*arguments, (targets + 1).to(lab.device))
    same = _same_path(verdict.path, expected.path) and torch.equal(
        verdict.output_token_ids.cpu(), expected.output_token_ids
    )
    noticed = not torch.equal(other.output_token_ids.cpu(), expected.output_token_ids)
    accepted = expected.path.num_accepted.double().mean().item()
    return {"passed": same and noticed, "control_noticed": noticed, "accepted": accepted}


def path(nodes: int, batch: int, lab: Lab) -> Record:
    """`accept_path` with scores, then `close_path`, against the torch functions."""
    from vllm_medusa.sampler import accept_path, close_path, launch

    tree, tokens = random_trees(batch, nodes, nodes + 1)
    generator = torch.Generator().manual_seed(2)
    accepted = torch.rand(tokens.shape, generator=generator) < 0.8
    score = torch.randint(-3, 3, tokens.shape, generator=generator).float()
    final = torch.randint(0, 99, (batch,), generator=generator)
    expected = accept_path(tree, accepted, score)
    closed = close_path(expected, tokens, final)
    there = moved(tree, lab.device)
    found = launch.accept_path(there, accepted.to(lab.device), score.to(lab.device))
    ends = launch.close_path(found, tokens.to(lab.device), final.to(lab.device))
    same = torch.equal(ends.output_token_ids.cpu(), closed.output_token_ids)
    return {"passed": same and _same_path(found, expected)}


def typical(nodes: int, batch: int, vocab: int, lab: Lab) -> Record:
    """`typical_path` from logits against the torch rule in fp64."""
    from vllm_medusa.sampler import launch, typical_path, typical_threshold

    tree, tokens = random_trees(batch, nodes, nodes + 2)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(int(tree.num_nodes.sum()), vocab, generator=generator) * 4  # ragged rows
    logits[:, :3] += 9  # the drafts are among the likely tokens
    starts = (tree.num_nodes.cumsum(0) - tree.num_nodes).unsqueeze(1)
    rows = torch.where(tree.valid, starts + torch.arange(nodes), 0)
    epsilon, delta = torch.full((batch,), 0.2), torch.full((batch,), 0.5)
    probs = logits.double().softmax(-1)[rows]
    expected = typical_path(tree, tokens, probs, epsilon.double(), delta.double())
    there = [t.to(lab.device) for t in (tokens, logits, rows, epsilon, delta)]
    found = launch.typical_path(moved(tree, lab.device), *there)  # type: ignore[arg-type]
    bar = typical_threshold(probs, 0.2, 0.5).gather(1, tree.parents.clamp(min=0))
    own = probs.flatten(1).gather(1, tree.parents.clamp(min=0) * vocab + tokens)
    near = (((own / bar - 1).abs() < NEAR) & tree.valid).any(1)
    differs = (found.nodes.cpu() != expected.nodes).any(1)
    accepted = expected.num_accepted.double().mean().item()
    return {
        "passed": not bool((differs & ~near).any()),
        "differences": int(differs.sum()),
        "accepted": accepted,
    }


def proposal(vocab: int, batch: int, dtype: torch.dtype, lab: Lab) -> Record:
    """`propose`, whole and from 1, 4 and 8 shards, against the torch rule; bf16 is full of ties."""
    from vllm_medusa.proposer import kernel, propose
    from vllm_medusa.proposer.sharded import VocabShard

    tree = TokenTree.dense((5, 4, 3)).prefix(64)
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(batch, 4, vocab, generator=generator) * 3).to(dtype)
    expected = propose(logits, TreeTensors.from_tree(tree))
    there, logits = TreeTensors.from_tree(tree, lab.device), logits.to(lab.device)
    record: Record = {"whole": torch.equal(kernel.propose(logits, there).cpu(), expected)}
    for ranks in (1, 4, 8):
        width = -(-vocab // ranks)
        keys = []
        for rank in range(ranks):
            shard = VocabShard.of_rank(rank, width, vocab)
            own = logits[:, : tree.max_depth, shard.first_id : shard.first_id + shard.num_ids]
            keys.append(kernel.local_topk(own, max(tree.head_widths), shard))
        tokens = kernel.fill_tree(torch.stack(keys), there)
        record[f"shards_{ranks}"] = torch.equal(tokens.cpu(), expected)
    return record | {"passed": all(record.values())}


def compaction(layout: str, dtype: torch.dtype, small: bool, lab: Lab) -> Record:
    """`compact_layers` against the torch copy, bit by bit; left out, it must be noticed."""
    from vllm_medusa.kv import LayerCaches, accepted_moves, copy_slots, kernel
    from vllm_medusa.sampler import path_to_node

    batch, layers, heads, width, size = (2, 2, 2, 16, 4) if small else (16, 8, 8, 256, 16)
    tree, _ = random_trees(batch, 64, 5)
    generator = torch.Generator().manual_seed(6)
    last = (torch.rand(batch, generator=generator) * tree.num_nodes).long()
    path = path_to_node(tree, last)
    blocks = batch * (64 // size + 1)
    slots = torch.randperm(blocks * size, generator=generator)[: batch * 64].view(batch, 64)
    memory = [
        torch.randint(0, 256, (blocks, heads, size, width * dtype.itemsize), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        for _ in range(layers)
    ]
    dims = (0, 2)
    if layout == "tokens first":
        memory = [cache.transpose(1, 2).contiguous() for cache in memory]
        dims = (0, 1)
    before = [cache.to(lab.device, copy=True) for cache in memory]
    caches = [cache.clone() for cache in before]
    where = [t.to(lab.device) for t in (slots, path.nodes, path.num_accepted)]
    kernel.compact_layers(LayerCaches.of(caches, dims), *where)
    for cache in memory:
        copy_slots(cache, *accepted_moves(slots, path.nodes, path.num_accepted), dims)
    pairs = list(zip(caches, memory, strict=True))
    same = all(torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8)) for a, b in pairs)
    old = zip(before, memory, strict=True)
    noticed = not any(torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8)) for a, b in old)
    return {"passed": same and noticed, "control_noticed": noticed}


def _same_path(a: object, b: object) -> bool:
    """Equal nodes, lengths and last nodes."""
    pairs = [(getattr(a, n), getattr(b, n)) for n in ("nodes", "num_accepted", "last_node")]
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)
