"""Trees over recurrent layers, the experiment of docs/how/recurrent.md; engines refuse them.

The step of each node starts from its parent's state instead of that of the row before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 5]  # -1: the state after the context
CONTEXT, NODES, HEADS, SIZE, PAST = 7, len(PARENTS), 2, 6, 3
ROWS = CONTEXT + NODES
State = tuple[Tensor, Tensor]  # [HEADS, SIZE, SIZE], and a convolution's inputs [PAST, channels]
SHAPES = (ROWS, 3 * HEADS * SIZE), (PAST + 1, 3 * HEADS * SIZE), (ROWS, HEADS, 1), (ROWS, HEADS, 1)
generator = torch.Generator().manual_seed(0)
INPUTS, FILTER, RATE, GATE = (torch.randn(s, generator=generator).double() for s in SHAPES)
START = torch.zeros(HEADS, SIZE, SIZE).double(), torch.zeros(PAST, 3 * HEADS * SIZE).double()


def step(kind: str, state: State, row: int) -> tuple[State, Tensor]:
    """A convolution, then the recurrence: the next state, and the output [HEADS, SIZE]."""
    memory, window = state[0], torch.cat([state[1], INPUTS[row, None]])
    q, k, v = F.silu((window * FILTER).sum(0)).view(3, HEADS, SIZE)
    if kind == "delta":  # Qwen3-Next: S <- a S + b k (v - a S k)
        k, memory = F.normalize(k, dim=-1), torch.exp(-F.softplus(GATE[row]))[..., None] * memory
        v = RATE[row].sigmoid() * (v - torch.einsum("hkv,hk->hv", memory, k))
    else:  # Mamba-2: S <- exp(-dt A) S + dt B x
        rate = F.softplus(RATE[row])
        v, memory = rate * v, torch.exp(-rate * GATE[row].exp())[..., None] * memory
    memory = memory + torch.einsum("hk,hv->hkv", k, v)
    return (memory, window[1:]), torch.einsum("hkv,hk->hv", memory, q)


def run(kind: str, start: State, rows: Sequence[int], parents: Sequence[int]) -> list[list[Tensor]]:
    """The state's parts and the output of each row."""
    found: list[list[Tensor]] = []
    for row, parent in zip(rows, parents, strict=True):
        memory, past = start if parent < 0 else found[parent][:2]
        state, output = step(kind, (memory, past), row)
        found.append([*state, output])
    return found


@pytest.mark.parametrize("kind", ["delta", "mamba2"])
def test_nodes_continue_from_their_parents(kind: str) -> None:
    """Selecting a node's state replaces compaction. Run as a chain, nodes on branches are wrong."""
    memory, past, _ = run(kind, START, range(CONTEXT), range(-1, CONTEXT - 1))[-1]
    nodes = range(CONTEXT, ROWS)
    tree = run(kind, (memory, past), nodes, PARENTS)
    chain = run(kind, (memory, past), nodes, range(-1, NODES - 1))
    path: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        path.append([*(path[parent] if node else range(CONTEXT)), CONTEXT + node])
        dense = run(kind, START, path[node], range(-1, len(path[node]) - 1))[-1]
        torch.testing.assert_close(tree[node], dense)
        assert torch.allclose(chain[node][2], dense[2]) == (node < 2)
