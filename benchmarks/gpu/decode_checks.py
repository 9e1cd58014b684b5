"""Do the kernels together decode as plain decoding does? Small models in fp32, under graphs.

Heads are fitted to the plain text, so that paths are accepted, and the tree lists its nodes so that
every accepted path has to move. Caches are NaN until written. Leaving the compaction out must
change the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.decoder import Decoder, HeadLogits
from benchmarks.gpu.model import SMALL, TINY, ModelShape, Target
from vllm_medusa.tree.topology import TokenTree

PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [8, 3, 9], [5, 5, 1, 0, 2, 10, 4, 4, 6, 1, 3, 2, 8, 7, 9, 0, 1])
TOLERANCE = 1e-3  # of fp32 logits around 1: products of other shapes add in another order


def cases(small: bool) -> list[Case]:
    """Logits at the nodes, then whole texts."""
    shape = TINY if small else SMALL
    tokens, nodes = (8, (9,)) if small else (120, (16, 64))
    found = [Case("logits at the nodes", partial(node_logits, shape, min(nodes)))]
    for count in nodes:
        name = f"tree of {count} nodes decodes as plain"
        found.append(Case(name, partial(same_text, shape, count, tokens)))
    return found


@dataclass(frozen=True)
class Decoded:
    """What a run of steps gave."""

    texts: list[list[int]]  # of each prompt
    hidden: list[Tensor]  # of each step, [B * N, H]


class Uncompacted(Decoder):
    """Leaves keys and values where they were scored: wrong, to see that it is noticed."""

    def verify(self) -> None:
        """Walk only."""
        from vllm_medusa.sampler.launch import target_verdict

        target_verdict(self.trees, self.tokens, self.chosen, out=self.verdict)


def fitted_heads(hidden: Tensor, texts: list[list[int]], vocab: int, count: int = 3) -> HeadLogits:
    """Heads that know these texts: least squares from the hidden states that gave them.

    ``hidden`` is [T, B, H], of the position that gave token t of each text.
    """
    length = len(hidden) - count
    states = hidden[:length].flatten(0, 1).double().cpu()  # [S, H]
    tokens = torch.tensor(texts).T  # [T, B]
    future = torch.stack([tokens[h + 1 : h + 1 + length] for h in range(count)])  # [K, T, B]
    wanted = torch.nn.functional.one_hot(future.flatten(1), vocab).double()  # [K, S, V]
    gram = states.T @ states + 1e-3 * torch.eye(states.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, states.T @ wanted).to(hidden)  # [K, H, V]

    def logits(states: Tensor) -> Tensor:
        return torch.einsum("bh,khv->bkv", states, weight)

    return logits


def a_tree(nodes: int) -> TokenTree:
    """Three deep, the best choices last on each level, so that an accepted path has to move."""
    paths = TokenTree.dense((4, 4, 3)).prefix(nodes).paths
    order = sorted(paths, key=lambda path: (len(path), [-rank for rank in path]))
    return TokenTree(tuple(order))


def prompts(target: Target) -> list[list[int]]:
    """In the target's vocabulary; fewer for an interpreter."""
    count = len(PROMPTS) if target.shape is SMALL else 2
    return [[token % target.shape.vocab for token in prompt] for prompt in PROMPTS[:count]]


def make_target(shape: ModelShape, lab: Lab) -> Target:
    """The model, in fp32."""
    return Target(shape, torch.float32, lab.device, positions=2048)


def decode(kind: type[Decoder], tokens: int, lab: Lab, *arguments: Any) -> Decoded:
    """At least ``tokens`` tokens for every prompt; ``arguments`` are target, tree and heads."""
    target, tree = arguments[:2]
    asked = prompts(target)
    most = tokens * (1 if tree is None else tree.max_depth + 1)
    capacity = max(map(len, asked)) + most + (1 if tree is None else tree.num_nodes)
    decoder = kind(target, [1] * len(asked), capacity, *arguments[1:])
    step = lab.clock.graph(decoder.step)
    for cache in decoder.caches:
        cache.fill_(float("nan"))
    for request, prompt in enumerate(asked):
        decoder.prefill(request, prompt)
    decoded = Decoded([[] for _ in asked], [])
    while min(map(len, decoded.texts)) < tokens:
        step()
        for text, new in zip(decoded.texts, decoder.emitted(), strict=True):
            text += new
        decoded.hidden.append(decoder.hidden.clone())
    return decoded


def same_text(shape: ModelShape, nodes: int, tokens: int, lab: Lab) -> Record:
    """Plain decoding, tree decoding, and tree decoding without compaction."""
    target, tree = make_target(shape, lab), a_tree(nodes)
    plain = decode(Decoder, tokens, lab, target, None)
    heads = fitted_heads(torch.stack(plain.hidden), plain.texts, shape.vocab)
    found = decode(Decoder, tokens, lab, target, tree, heads)
    wrong = decode(Uncompacted, tokens, lab, target, tree, heads)
    agree = [_agreement(a, b) for a, b in zip(found.texts, plain.texts, strict=True)]
    noticed = any(a[:tokens] != b for a, b in zip(wrong.texts, plain.texts, strict=True))
    per_step = sum(map(len, found.texts)) / len(found.hidden) / len(agree)
    return {
        "passed": min(agree) >= tokens and noticed and per_step > 2,
        "tokens_equal": agree,
        "tokens_asked": tokens,
        "tokens_per_step": per_step,
        "control_noticed": noticed,
    }


def _agreement(a: list[int], b: list[int]) -> int:
    """How many tokens are alike before the first that isn't, or all that both have."""
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def node_logits(shape: ModelShape, nodes: int, lab: Lab) -> Record:
    """Logits at every node against those behind its path as a plain text."""
    target, tree = make_target(shape, lab), a_tree(nodes)
    hidden = torch.randn(4, 1, shape.hidden).to(lab.device)
    heads = fitted_heads(hidden, [[0, 1, 2, 3]], shape.vocab)  # of any kind
    asked = prompts(target)
    decoder = Decoder(target, [1] * len(asked), 64 + nodes, tree, heads)
    for request, prompt in enumerate(asked):
        decoder.prefill(request, prompt)
    decoder.score()
    scored = decoder.logits.view(len(asked), nodes, -1)
    worst = 0.0
    for request, prompt in enumerate(asked[:1] if lab.interpreted else asked):
        plain = Decoder(target, [1], 64 + nodes)
        row = decoder.tokens[request].tolist()
        for node in range(nodes):
            path, at = [], node
            while at > 0:
                path.append(row[at])
                at = tree.parents[at]
            hidden = plain.prefill(0, [*prompt, *reversed(path), 0])
            off = (target.logits(hidden[-1:])[0] - scored[request, node]).abs().max().item()
            worst = max(worst, off)
    return {"passed": worst < TOLERANCE, "error": worst, "nodes": nodes}
