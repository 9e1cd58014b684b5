"""Past this machine, by simulation: the budget on cost tables of GPUs, with measured acceptance.

    python -m benchmarks gpu_shapes --json build/gpu_shapes.json

Nothing here ran on a GPU. A step costs what a roofline of public data sheets says; drafts bring
what measured heads brought; `vllm_medusa.budget` decides, on noisy step times and sampled
acceptance, as it does in a server that timed each power of two of rows once at its start. It is
judged by the second half of its steps, with all that it tries. Static trees and chains are the best
of all their sizes, chosen anew for every batch by somebody who knows it all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Row, attempt
from vllm_medusa.budget.acceptance import Acceptance
from vllm_medusa.budget.cost import Floats, StepCost
from vllm_medusa.budget.policy import Auto
from vllm_medusa.job import Progress
from vllm_medusa.options import AtLeastZero, Options, Positive, Seed, option

MOST_NODES = 31
HEADS = 5
_MEMORY, _COMPUTE = 0.8, 0.6  # of the data sheet's, reached
_LAUNCH = 0.7  # ms a step: launches, sampling, what the host does in between
_REDUCE = 0.010  # ms: latency of an all-reduce; two a layer
_CAPTURED = 512  # rows; up to here a step is padded to a captured size


@dataclass(frozen=True)
class Gpu:
    """From its data sheet: memory GB/s, dense bf16 TFLOPS, NVLink GB/s one way."""

    name: str
    memory: float
    tflops: float
    link: float


@dataclass(frozen=True)
class Model:
    """From its configuration; bf16 weights and cache."""

    name: str
    params: float
    layers: int
    hidden: int
    kv: int  # width of keys, which is that of values
    vocab: int


A100 = Gpu("A100-80GB", 2039, 312, 300)
H100 = Gpu("H100-SXM", 3350, 989, 450)
SMALL = Model("7B", 7.6e9, 28, 3584, 512, 152064)  # Qwen2.5-7B
LARGE = Model("70B", 70.6e9, 80, 8192, 1024, 128256)  # Llama-3-70B
SHAPES = (
    (SMALL, A100, 1),
    (LARGE, A100, 4),
    (LARGE, A100, 8),
    (SMALL, H100, 1),
    (LARGE, H100, 4),
    (LARGE, H100, 8),
)
# Tokens per step by draft nodes, of heads of a 292M target on held-out text; see `ASSUMPTIONS`.
SIZES = (2, 4, 7, 15, 31)
DYNAMIC = {
    "greedy": (1.701, 1.888, 2.028, 2.292, 2.501),
    "T 0.8": (1.553, 1.718, 1.841, 1.987, 2.088),
}
STATIC = {
    "greedy": (1.625, 1.798, 1.932, 2.186, 2.391),
    "T 0.8": (1.503, 1.669, 1.751, 1.927, 2.037),
}
CHAIN = {"greedy": 1.77, "T 0.8": 1.64}  # of five; when sampling, in proportion to trees of four
ASSUMPTIONS = (
    f"Simulation, nothing ran on these GPUs. Step: weights at {_MEMORY:.0%} of the data sheet's "
    f"bandwidth or arithmetic at {_COMPUTE:.0%} of its dense bf16, whichever takes longer, + cache "
    f"of all requests once + {_LAUNCH} ms launches",
    f"+ two all-reduces a layer ({1e3 * _REDUCE:.0f} us each + traffic); rows padded to captured "
    f"sizes up to {_CAPTURED}. Heads: {HEADS} residual blocks, the target's LM head. 7B: "
    "Qwen2.5-7B, 70B: Llama-3-70B. A100: 2039 GB/s,",
    "312 TFLOPS; H100: 3350 GB/s, 989 TFLOPS. Tokens per step: heads of a 292M target, held-out "
    "text, the same in all steps and requests (what one pool brings beyond that is left out);",
    "static tree and chain: the best size for each batch, known beforehand. Automatic: each power "
    "of two of rows timed once at start-up, 5 % noise in step times, sampled acceptance, tries "
    "included.",
)


class ShapesOptions(Options):
    """What is simulated."""

    batches: tuple[Positive, ...] = option("requests", default=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    context: Positive = option("tokens in the cache of each request", default=1024)
    steps: Positive = option("of the budget; judged by the second half", default=600)
    noise: AtLeastZero = option("of step times, relative", default=0.05)
    seed: Seed = option(default=0)


@dataclass(frozen=True)
class Server:
    """One model on some GPUs."""

    model: Model
    gpu: Gpu
    count: int
    context: int

    @property
    def name(self) -> str:
        """Such as "70B on 4 A100-80GB"."""
        return f"{self.model.name} on {self.count} {self.gpu.name}"

    def ms(self, rows: int, requests: int, share: float) -> float:
        """Of a step with a share of the heads."""
        model, padded = self.model, captured(rows)
        work = 2 * model.params + 4 * self.context * model.hidden * model.layers
        cache = 4.0 * model.kv * model.layers * self.context * requests
        found = self._roof(2 * model.params, work * padded) + self._roof(cache, 0.0) + _LAUNCH
        if self.count > 1:
            share = 2 * (self.count - 1) / self.count
            traffic = share * 2 * padded * model.hidden / (1e6 * self.gpu.link)
            found += 2 * model.layers * (_REDUCE + traffic)
        if share:
            heads = HEADS * share
            blocks, lm_head = heads * model.hidden**2, model.vocab * model.hidden
            work = 2.0 * requests * (blocks + heads * lm_head)
            found += self._roof(2.0 * (blocks + lm_head), work) + 0.1
        return found

    def _roof(self, read: float, work: float) -> float:
        """Ms for bytes and operations, spread over all GPUs."""
        memory = read / (1e6 * self.gpu.memory * _MEMORY)
        return max(memory, work / (1e9 * self.gpu.tflops * _COMPUTE)) / self.count


def captured(rows: int) -> int:
    """The size of the CUDA graph that holds so many rows: vLLM's usual ones."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    stride = 8 if rows <= 256 else 16
    return -(-rows // stride) * stride if rows <= _CAPTURED else rows


def worths(taus: Sequence[float]) -> Floats:
    """[31] what each further node brings; straight lines on a logarithmic scale, kept concave."""
    nodes = np.arange(1, MOST_NODES + 1)
    first = 1 + 0.65 * (taus[0] - 1)  # the first of two nodes brings about two thirds
    known = np.interp(np.log(nodes), np.log([1, *SIZES]), [first, *taus])
    return np.minimum.accumulate(np.diff([1.0, *known]))


def chain_worths(tau: float, first: float) -> Floats:
    """[5] what each node of a chain brings: one factor from node to node, ``tau`` in all."""
    low, high = 0.0, 1.0
    for _ in range(60):
        factor = (low + high) / 2
        worth = first * factor ** np.arange(HEADS)
        low, high = (factor, high) if worth.sum() < tau - 1 else (low, factor)
    return worth


def fixed(server: Server, requests: int, worth: Floats) -> tuple[float, int]:
    """Tokens a ms and nodes a request with the best of all sizes, at least one."""
    rates = [
        requests
        * (1 + worth[:nodes].sum())
        / server.ms(requests * (1 + nodes), requests, min(1.0, nodes / HEADS))
        for nodes in range(1, len(worth) + 1)
    ]
    return max(rates), 1 + int(np.argmax(rates))


def automatic(
    server: Server, requests: int, worth: Floats, options: ShapesOptions
) -> tuple[float, float, float]:
    """Tokens a ms, nodes a request, and how far the learned cost is off, relative."""
    seed = zlib.crc32(f"{server.name} {requests} {options.seed}".encode())
    rng, room = np.random.default_rng(seed), requests * MOST_NODES
    budget = Auto(StepCost(requests + room), Acceptance(), MOST_NODES, HEADS)
    for rows in (1 << power for power in range((requests + room).bit_length())):  # at start-up
        for share in {0.0, 0.2, float(rows > requests)} if rows >= requests else ():
            ms = server.ms(rows, requests, share)
            budget.observe(rows, requests, share, ms * float(np.exp(rng.normal(0, options.noise))))
    tokens, times, verified, limit = [], [], [], 0
    for _ in range(options.steps):
        have, survival = limit, np.tile(worth[:limit], (requests, 1))
        gain = np.sort(survival.ravel())[::-1].cumsum()
        nodes = budget.total(gain, requests, room) if have else 0
        limit = budget.limit(requests, room)
        counts = np.full(requests, nodes // requests)
        counts[: nodes % requests] += 1
        expected = np.concatenate([[0.0], worth.cumsum()])[counts]
        share = float(budget.share_of(limit))
        ms = server.ms(requests + nodes, requests, share)
        told = ms * float(np.exp(rng.normal(0, options.noise)))
        budget.observe(requests + nodes, requests, share, told)
        if have:
            whole = np.floor(expected)
            accepted = whole + (rng.random(requests) < expected - whole)
            limited = have if have < MOST_NODES else None
            budget.acceptance.observe(survival, counts, accepted, [0] * requests, limited)
        tokens.append(requests + expected.sum())
        times.append(ms)
        verified.append(nodes)
    half = options.steps // 2
    rows = requests + int(np.median(verified[half:]))
    off = budget.cost.ms(rows, requests, share) / server.ms(rows, requests, share) - 1
    rate = sum(tokens[half:]) / sum(times[half:])
    return rate, float(np.mean(verified[half:])) / requests, abs(off)


def run(options: ShapesOptions, progress: Progress) -> Iterator[Row]:
    """A row for each server, acceptance and batch."""
    for model, gpu, count in SHAPES:
        server = Server(model, gpu, count, options.context)
        for text in DYNAMIC:
            for requests in options.batches:
                what = {"name": server.name, "text": text, "batch": requests}
                yield attempt(what, lambda s=server, w=what: _measure(s, w, options))  # type: ignore[misc]


def _measure(server: Server, what: dict[str, Any], options: ShapesOptions) -> Row:
    text, requests = what["text"], what["batch"]
    trees, chains = worths(STATIC[text]), chain_worths(CHAIN[text], worths(STATIC[text])[0])
    plain = requests / server.ms(requests, requests, 0.0)
    tree, tree_nodes = fixed(server, requests, trees)
    chain, chain_nodes = fixed(server, requests, chains)
    all_ms = server.ms(requests * (1 + MOST_NODES), requests, 1.0)
    rate, nodes, off = automatic(server, requests, worths(DYNAMIC[text]), options)
    numbers = {
        "plain_ms": requests / plain,
        "automatic": rate / plain,
        "automatic_nodes": nodes,
        "tree": tree / plain,
        "tree_nodes": tree_nodes,
        "whole_tree": requests * (1 + trees.sum()) / all_ms / plain,
        "chain": chain / plain,
        "chain_nodes": chain_nodes,
        "off": off,
    }
    return Row(what, numbers, right=off < 0.1)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each server, what is assumed below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, panels = plt.subplots(2, 3, figsize=(15, 9.6), sharex=True, sharey=True, squeeze=False)
    lines = (
        ("automatic", "automatic", {"color": "tab:red", "lw": 2.5, "zorder": 3}),
        ("tree", "best static tree of each batch", {"color": "tab:blue", "marker": "o", "ms": 4}),
        ("chain", "best chain of each batch", {"color": "tab:green", "marker": "s", "ms": 4}),
        ("whole_tree", "static tree of 31 everywhere", {"color": "0.55", "ls": "-."}),
    )
    for name, panel in zip(names, panels.flat, strict=False):
        for text in DYNAMIC:
            here = [r for r in rows if (r["name"], r["text"]) == (name, text) and "automatic" in r]
            batches = [row["batch"] for row in here]
            for key, label, style in lines if text == "greedy" else lines[:1]:
                if text != "greedy":
                    style, label = style | {"ls": ":", "lw": 2}, f"{label}, {text}"
                panel.plot(batches, [row[key] for row in here], label=label, **style)
        panel.axhline(1.0, color="black", lw=1, label="plain")
        panel.set_xscale("log", base=2)
        panel.set(title=name)
        panel.grid(alpha=0.3)
    batches = sorted({row["batch"] for row in rows})
    panels[0][0].set_xticks(batches, [str(batch) for batch in batches])
    panels[0][0].set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set(xlabel="requests in the batch")
    for panel in panels[:, 0]:
        panel.set(ylabel="speed against plain decoding")
    panels[0][0].legend(fontsize=8, frameon=False, loc="lower left")
    figure.suptitle("Predicted speed-up, greedy text (dotted: automatic at T 0.8)")
    figure.text(0.01, 0.01, "\n".join(ASSUMPTIONS), fontsize=8.5, va="bottom")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def text(rows: list[dict[str, Any]]) -> str:
    """The worst of all, and what was assumed."""
    found = [row for row in rows if "automatic" in row]
    if not found:
        return ""
    least = min(row["automatic"] for row in found)
    against = min(row["automatic"] / max(1.0, row["tree"], row["chain"]) for row in found)
    return (
        f"Automatic is at least {least:.3f} of plain decoding and at least {against:.3f} of the "
        "best of plain decoding, static trees and chains, in all rows.\n\n" + " ".join(ASSUMPTIONS)
    )


CASE = Case(
    ShapesOptions,
    run,
    {
        "name": ("server", ""),
        "text": ("text", ""),
        "batch": ("batch", "d"),
        "plain_ms": ("plain step ms", ".1f"),
        "automatic": ("automatic", ".3f"),
        "automatic_nodes": ("its nodes a request", ".1f"),
        "tree": ("best static tree", ".3f"),
        "tree_nodes": ("nodes", "d"),
        "whole_tree": ("static tree of 31", ".3f"),
        "chain": ("best chain", ".3f"),
        "chain_nodes": ("nodes", "d"),
    },
    quick={"batches": (1, 16, 256), "steps": 200},
    picture=draw,
    text=text,
)
