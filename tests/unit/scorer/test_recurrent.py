"""Trees over recurrent layers: an experiment for docs/how/recurrent.md; vLLM refuses such targets.

A layer with a recurrent state has no cache to mask, but it has a step: (state, inputs) -> (state,
output). Level by level, each node's step starts from its parent's state. Afterwards the accepted
node's state is the request's. A convolution's state, its last inputs, follows the same pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 5]
CONTEXT, NODES, HEADS, D, KERNEL = 7, len(PARENTS), 2, 6, 4
State = tuple[Tensor, Tensor]  # [.., HEADS, D, D], [.., KERNEL - 1, channels]


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = 3 * HEADS * D
    return {
        "conv": normal(channels, KERNEL),
        "x": normal(CONTEXT + NODES, channels),
        "rate": normal(CONTEXT + NODES, HEADS),
        "gate": normal(CONTEXT + NODES, HEADS),
    }


def convolved(w: dict[str, Tensor], past: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """One token of a short causal convolution per row: outputs, and the new last inputs."""
    window = torch.cat([past, w["x"][tokens].unsqueeze(1)], 1)  # [n, KERNEL, channels]
    return F.silu((window * w["conv"].T).sum(1)), window[:, 1:]


def delta(w: dict[str, Tensor], state: State, tokens: Tensor) -> tuple[State, Tensor]:
    """Gated delta rule (Qwen3-Next): S <- a S + b k (v - a S k)^T, with k a unit vector."""
    memory, past = state
    mixed, past = convolved(w, past, tokens)
    q, k, v = mixed.unflatten(-1, (3, HEADS, D)).unbind(1)
    k = F.normalize(k, dim=-1)
    decay = torch.exp(-F.softplus(w["gate"][tokens]))[..., None, None]
    memory = decay * memory
    error = v - torch.einsum("nhkv,nhk->nhv", memory, k)
    memory = memory + torch.einsum(
        "nhk,nhv->nhkv", k, error * w["rate"][tokens].sigmoid()[..., None]
    )
    return (memory, past), torch.einsum("nhkv,nhk->nhv", memory, q)


def mamba2(w: dict[str, Tensor], state: State, tokens: Tensor) -> tuple[State, Tensor]:
    """Mamba-2: S <- exp(-dt A) S + dt B x^T."""
    memory, past = state
    mixed, past = convolved(w, past, tokens)
    c, b, x = mixed.unflatten(-1, (3, HEADS, D)).unbind(1)
    dt = F.softplus(w["rate"][tokens])[..., None, None]
    decay = torch.exp(-dt * w["gate"][tokens].exp()[..., None, None])
    memory = decay * memory + dt * torch.einsum("nhk,nhv->nhkv", b, x)
    return (memory, past), torch.einsum("nhkv,nhk->nhv", memory, c)


STEPS: dict[str, Callable[..., tuple[State, Tensor]]] = {"delta": delta, "mamba2": mamba2}


def empty() -> State:
    channels = 3 * HEADS * D
    return (
        torch.zeros(1, HEADS, D, D, dtype=torch.float64),
        torch.zeros(1, KERNEL - 1, channels, dtype=torch.float64),
    )


def dense(step: Any, w: dict[str, Tensor], tokens: list[int]) -> tuple[State, list[Tensor]]:
    """A plain pass over a sequence: the last state, and every output."""
    state, outputs = empty(), []
    for token in tokens:
        state, output = step(w, state, torch.tensor([token]))
        outputs.append(output[0])
    return state, outputs


def over_tree(
    step: Any, w: dict[str, Tensor], state: State, parents: list[int]
) -> tuple[State, Tensor]:
    """All nodes, level by level: their states [NODES, ...] and outputs."""
    depths = [0] * NODES
    for node in range(1, NODES):
        depths[node] = depths[parents[node]] + 1
    states: Any = tuple(part.expand(NODES + 1, *part.shape[1:]).clone() for part in state)
    outputs = torch.zeros(NODES, HEADS, D, dtype=torch.float64)
    for level in range(max(depths) + 1):
        nodes = torch.tensor([node for node in range(NODES) if depths[node] == level])
        starts = torch.tensor(parents)[nodes]  # the root's, -1, is the context's state
        new, outputs[nodes] = step(w, tuple(part[starts] for part in states), CONTEXT + nodes)
        for part, value in zip(states, new, strict=True):
            part[nodes] = value
    return states, outputs


def tokens_to(node: int) -> list[int]:
    """The context, then the node's path."""
    above = list(range(CONTEXT)) if node == 0 else tokens_to(PARENTS[node])
    return [*above, CONTEXT + node]


@pytest.mark.parametrize("name", STEPS)
def test_nodes_equal_dense_passes(name: str) -> None:
    step, w = STEPS[name], weights()
    context, _ = dense(step, w, list(range(CONTEXT)))
    states, outputs = over_tree(step, w, context, PARENTS)
    for node in range(NODES):
        state, expected = dense(step, w, tokens_to(node))
        torch.testing.assert_close(outputs[node], expected[-1])
        for part, whole in zip(states, state, strict=True):
            torch.testing.assert_close(part[node], whole[0])


@pytest.mark.parametrize("name", STEPS)
def test_decoding_continues_from_the_accepted_node(name: str) -> None:
    """Selecting a node's state replaces compaction; rejected nodes leave no trace."""
    step, w, accepted, following = STEPS[name], weights(), 5, CONTEXT + 8
    context, _ = dense(step, w, list(range(CONTEXT)))
    states, _ = over_tree(step, w, context, PARENTS)
    state: Any = tuple(part[accepted : accepted + 1] for part in states)
    _, output = step(w, state, torch.tensor([following]))
    _, expected = dense(step, w, [*tokens_to(accepted), following])
    torch.testing.assert_close(output[0], expected[-1])


@pytest.mark.parametrize("name", STEPS)
def test_nodes_as_a_chain_are_wrong(name: str) -> None:
    """As vLLM's recurrent layers treat drafts: each node starts from the node before it."""
    step, w = STEPS[name], weights()
    context, _ = dense(step, w, list(range(CONTEXT)))
    _, right = over_tree(step, w, context, PARENTS)
    _, chained = over_tree(step, w, context, list(range(-1, NODES - 1)))
    same = [torch.allclose(a, b) for a, b in zip(chained, right, strict=True)]
    assert same == [node < 2 for node in range(NODES)]  # node 2 is a sibling of 1
