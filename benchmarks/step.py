"""The cost of a tree's step relative to a plain step: a 7B-shaped target, bf16, under CUDA graphs.

    python -m benchmarks kernels step

Weights are random, and the verdict is fixed in advance (``planted`` in `benchmarks.gpu.decoder`),
so that every step accepts five drafts and moves their keys and values. Two kinds of heads are
timed: with separate LM heads, as published for Medusa, and with the target's LM head for all.

    step      everything, as one graph
    score     forward pass, logits, argmax       attention  its attention, all layers
    verify    walk and compaction                propose    heads, top-k, the next tree
    lookup    not part of the step: copies from texts as long as the context, launched eagerly

Needs only torch and Triton.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.case import Case, Plot, Row, attempt, titled
from benchmarks.gpu.clock import Clock, here
from benchmarks.gpu.decoder import Decoder, HeadLogits, step_tree
from benchmarks.gpu.model import LLAMA_2_7B, LLAMA_3_8B, Target
from benchmarks.gpu.model import TINY as TINY_SHAPE
from vllm_medusa.job import Progress
from vllm_medusa.lookup.lookup import Lookup
from vllm_medusa.options import Options, Positive, option
from vllm_medusa.tree.draft_trees import DraftTrees

HEADS = 5
MODELS = {shape.name: shape for shape in (LLAMA_2_7B, LLAMA_3_8B, TINY_SHAPE)}


class StepOptions(Options):
    """Steps to measure."""

    models: tuple[str, ...] = option(default=(LLAMA_2_7B.name, LLAMA_3_8B.name))
    batches: tuple[Positive, ...] = option(default=(1, 4, 8))
    contexts: tuple[Positive, ...] = option(default=(1024, 4096))
    nodes: tuple[Positive, ...] = option(
        "numbers of nodes; a plain step is measured first", default=(16, 32, 64)
    )

    def check(self) -> None:
        """Refuse unknown models."""
        if unknown := set(self.models) - MODELS.keys():
            raise ValueError(f"models has {unknown}; use some of {', '.join(MODELS)}")


def run(options: StepOptions, progress: Progress) -> Iterator[Row]:
    """A row for each model, batch, context and number of nodes; times in microseconds."""
    device, clock = here()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for model in options.models:
        target = Target(MODELS[model], dtype, device, positions=max(options.contexts) + 256)
        heads = make_heads(target, own=True), make_heads(target, own=False)
        for batch, context in product(options.batches, options.contexts):
            plain: dict[str, float] = {}
            for nodes in (1, *options.nodes):
                what = {"model": model, "batch": batch, "context": context, "nodes": nodes}
                what["name"] = f"{model}, batch {batch}, context {context}, {nodes} nodes"
                yield attempt(what, partial(measure, what, target, *heads, clock, plain))
                if device == "cuda":
                    torch.cuda.empty_cache()


def make_heads(target: Target, own: bool) -> HeadLogits:
    """Five heads of one residual layer, with their own LM heads or the target's."""
    from vllm_medusa.heads.model import MedusaHeads

    shape = target.shape
    heads = MedusaHeads(
        HEADS,
        1,
        shape.hidden,
        shape.vocab,
        num_lm_heads=HEADS if own else 0,
        device=target.device,
        dtype=target.dtype,
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=shape.hidden**-0.5)
    if not own:
        heads.store_lm_head(target.lm_head)
    return lambda hidden: heads.compute_logits(heads(hidden))


def make_lookup(batch: int, context: int, nodes: int, device: str) -> Callable[[], None]:
    """A step of lookup on texts with few distinct tokens, in which short matches are common."""
    rows = torch.arange(batch, device=device)
    texts = torch.randint(100, (batch, context), dtype=torch.int32, device=device)
    lengths, new, depth = (torch.full_like(rows, number) for number in (context, 1, nodes - 1))
    drafts, sampled = DraftTrees.roots(batch, nodes, device), torch.zeros_like(rows).bool()
    lookup = Lookup(100, batch, nodes - 1, torch.device(device))

    def call() -> None:
        lookup.learn(rows, texts, rows, lengths, new)
        lookup.extend(rows, texts, rows, lengths, drafts, depth, sampled, HEADS)

    return call


@torch.no_grad()
def measure(
    what: dict[str, Any],
    target: Target,
    own: HeadLogits,
    shared: HeadLogits,
    clock: Clock,
    plain: dict[str, float],  # time of the plain step, set when it is measured
) -> Row:
    """The parts and the whole, for one number of nodes; every step must accept planted drafts."""
    batch, context, nodes = what["batch"], what["context"], what["nodes"]
    tree = step_tree(nodes) if nodes > 1 else None
    decoder = Decoder(target, [context] * batch, context + nodes, tree, own, planted=True)

    def time(call: Any) -> float:
        return statistics.median(clock.graph(call))

    shape = target.shape
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    qkv = torch.randn(batch * nodes, width).to(target.device, target.dtype)
    found: dict[str, Any] = {"step_us": time(decoder.step)}
    right = bool(decoder.logits.isfinite().all())
    found["score_us"] = time(decoder.score)
    found["attention_us"] = time(partial(decoder.attention, qkv))
    found["step_eager_us"] = clock.wall(decoder.step)
    if tree is None:
        plain |= found
    else:
        right &= decoder.verdict.path.num_accepted.tolist() == [tree.max_depth] * batch
        found["verify_us"] = time(decoder.verify)
        found["propose_us"] = time(decoder.propose)
        found["lookup_us"] = clock.wall(make_lookup(batch, context, nodes, target.device))
        decoder.head_logits = shared
        found["propose_shared_us"] = time(decoder.propose)
        found["step_shared_us"] = time(decoder.step)
        if plain:
            found["ratio"] = found["step_us"] / plain["step_us"]
            found["ratio_shared"] = found["step_shared_us"] / plain["step_us"]
    return Row(what, found | {"splits": decoder.batch.num_splits}, right)


CASE = Case(
    StepOptions,
    run,
    {
        **titled("model batch context nodes"),
        "step_us": ("step us", ".0f"),
        "ratio": ("relative to a plain step", ".3f"),
        "ratio_shared": ("with the target's LM head", ".3f"),
        **titled("score_us attention_us verify_us propose_us", ".0f"),
        "propose_shared_us": ("propose us, target's LM head", ".0f"),
        "step_eager_us": ("step eager us", ".0f"),
        "lookup_us": ("lookup eager us", ".0f"),
    },
    quick={"batches": (1,), "contexts": (1024,)},
    plot=Plot("nodes", ("ratio",), ("model", "batch", "context")),
)
