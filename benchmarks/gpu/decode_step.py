"""What a step of a tree costs beside a plain step: a 7B-shaped target, bf16, under CUDA graphs.

Weights are random, the verdict is planted (see `decoder`), so that every step accepts five drafts
and moves their keys and values. The drafts' heads are timed in both kinds: an LM head each, as
Medusa publishes them, and the target's own for all.

    step      all of it, as one graph
    score     forward pass, logits, argmax       attention  of it, all layers
    verify    walk and compaction                propose    heads, top-k, the next tree
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.decoder import Decoder, HeadLogits
from benchmarks.gpu.layouts import Spec, step_tree, to_compile
from benchmarks.gpu.model import LLAMA_2_7B, LLAMA_3_8B, ModelShape, Target

NODES = (1, 64, 32, 16)  # 1: plain decoding
HEADS = 5
TINY = ModelShape("tiny", 2, 32, 48, 2, 1, 16, 64)
PLACES = (  # model, batch; each with contexts of 1k and 4k
    (LLAMA_2_7B, 1),
    (LLAMA_3_8B, 1),
    (LLAMA_3_8B, 4),
    (LLAMA_3_8B, 8),
    (LLAMA_2_7B, 4),
    (LLAMA_2_7B, 8),
)


def cases(small: bool) -> list[Case]:
    """One case for each model, batch and context, with all numbers of nodes in it."""
    if small:
        return [_case(TINY, 2, 20, (1, 7))]
    return [_case(m, b, context, NODES) for m, b in PLACES for context in (1024, 4096)]


def _case(shape: ModelShape, batch: int, context: int, sizes: tuple[int, ...]) -> Case:
    def launch() -> None:
        for nodes in sizes:
            heads = (shape.heads, shape.kv_heads)
            spec = Spec("", *heads, batch, context, nodes, head_size=shape.head_size)
            to_compile(spec).attend()

    name = f"{shape.name}, batch {batch}, context {context}"
    return Case(name, partial(measure, shape, batch, context, sizes), launch)


def measure(
    shape: ModelShape, batch: int, context: int, sizes: tuple[int, ...], lab: Lab
) -> Record:
    """Times of every part for every number of nodes, and ratios to the plain step."""
    dtype = torch.bfloat16 if lab.device == "cuda" else torch.float32
    kept = lab.kept.get("target")
    if kept is None or kept[0].shape is not shape:
        lab.kept.clear()  # before the next model is made
        kept = None
        target = Target(shape, dtype, lab.device, positions=context + 256)
        kept = (target, make_heads(target, own=True), make_heads(target, own=False))
        lab.kept["target"] = kept
    target, own, shared = kept
    target.reach(context + 256)
    steps = []
    for nodes in sizes:
        found = one(target, own, shared, batch, context, nodes, lab)
        steps.append({"nodes": nodes, **found})
        if lab.device == "cuda":
            torch.cuda.empty_cache()
    plain = steps[0]["step_us"]
    for step in steps[1:]:
        step["ratio"] = step["step_us"] / plain
        step["ratio_shared"] = step["step_shared_us"] / plain
    bandwidth = lab.machine.get("copy_bytes_per_s")
    kv_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * dtype.itemsize
    read = shape.parameters * dtype.itemsize + batch * context * kv_bytes
    return {
        "passed": all(step["right"] for step in steps),
        "model": shape.name,
        "batch": batch,
        "context": context,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": shape.parameters,
        "plain_floor_us": read / bandwidth * 1e6 if bandwidth else None,
        "steps": steps,
    }


def make_heads(target: Target, own: bool) -> HeadLogits:
    """Five heads of one residual layer, with LM heads of their own or the target's."""
    from vllm_medusa.heads.model import MedusaHeads

    shape, device = target.shape, target.device
    heads = MedusaHeads(
        HEADS,
        1,
        shape.hidden,
        shape.vocab,
        shared_lm_head=not own,
        device=device,
        dtype=target.dtype,
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=shape.hidden**-0.5)
    if not own:
        heads.use_target_lm_head(target.lm_head)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return heads.compute_logits(heads(hidden))

    return logits


def one(
    target: Target,
    own: HeadLogits,
    shared: HeadLogits,
    batch: int,
    context: int,
    nodes: int,
    lab: Lab,
) -> dict[str, Any]:
    """Microseconds of the parts and of the whole, for one number of nodes."""
    tree = step_tree(nodes) if nodes > 1 else None
    contexts = [context] * batch
    decoder = Decoder(target, contexts, context + nodes, tree, own, planted=True)

    def time(call: Any) -> float:
        return statistics.median(lab.clock.device(lab.clock.graph(call), repeats=9))

    shape = target.shape
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    qkv = torch.empty(batch * nodes, width, dtype=target.dtype, device=target.device).normal_()
    found: dict[str, Any] = {"splits": decoder.batch.num_splits}
    found["step_us"] = time(decoder.step)
    right = bool(decoder.logits.isfinite().all())
    found["score_us"] = time(decoder.score)
    found["attention_us"] = time(partial(decoder.attention, qkv))
    found["step_eager_us"] = statistics.median(lab.clock.wall(decoder.step, repeats=5))
    if tree is not None:
        accepted = decoder.verdict.path.num_accepted.tolist()
        right &= accepted == [tree.max_depth] * batch
        found["verify_us"] = time(decoder.verify)
        found["propose_us"] = time(decoder.propose)
        decoder.head_logits = shared
        found["propose_shared_us"] = time(decoder.propose)
        found["step_shared_us"] = time(decoder.step)
    return found | {"right": right}
