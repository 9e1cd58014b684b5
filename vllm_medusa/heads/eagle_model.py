"""EAGLE-3's drafter in plain torch (https://arxiv.org/abs/2503.01840), for training.

An entry combines the target's hidden states at a position (three layers' inputs, projected to the
target's width by ``fc``) and the token after it; one decoder layer attends over the entries. A
norm and an LM head, over a part of the vocabulary, predict the next token. After the last exact
entry the drafter continues from its own layer's states: a chain of drafts.

`EagleDrafter` computes all chains of a text at once: row i has the exact entry i and the chain that
starts there, whose step s takes the text's token i + s + 1, has position i + s and attends to the
exact entries up to i and to the chain so far. Serving does the same (EAGLE-3 calls it
training-time test), so the K steps of a row are trained and measured like K heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_medusa.heads.eagle_checkpoint import default_layers
from vllm_medusa.heads.eagle_tensors import LAYER_IDS, rope_of
from vllm_medusa.heads.model import HeadsError

_HEAD_DIM = 64  # default if not in the target's config
OPTIONS = ("fc_norm", "norm_output", "norm_before_residual")  # of `EagleShape`, False in EAGLE-3
_LANES = 16  # number of added channels, so that SIMD vectors stay whole


@dataclass(frozen=True)
class EagleShape:
    """The sizes of an EAGLE-3 drafter."""

    hidden_size: int  # H, the target's
    vocab_size: int  # V, the target's
    layers: tuple[int, ...]  # target layers whose inputs are read, ascending
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float  # the name in configs before transformers 5
    rms_norm_eps: float
    max_position_embeddings: int
    fc_norm: bool = False  # a norm of each of the target's states before ``fc``
    norm_output: bool = False  # the next step's state is the normed one
    norm_before_residual: bool = False  # the layer's residual is the normed state

    @classmethod
    def of(
        cls, config: Any, layers: Sequence[int], hidden_size: int, vocab_size: int
    ) -> EagleShape:
        """One layer like those of a target with this transformers config (of its text part).

        ``config`` may also be a drafter's own.
        """
        heads = getattr(config, "num_attention_heads", None) or max(1, hidden_size // _HEAD_DIM)
        dim = getattr(config, "head_dim", None) or hidden_size // heads
        return cls(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            layers=tuple(layers),
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=dim + dim % 2,
            intermediate_size=getattr(config, "intermediate_size", None) or 3 * hidden_size,
            rope_theta=float(rope_of(vars(config)).get("rope_theta") or 10000.0),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
            max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or 2048),
            **{option: bool(getattr(config, option, False)) for option in OPTIONS},
        )

    def config(self, draft_vocab_size: int) -> dict[str, Any]:
        """The ``config.json`` from which vLLM builds the drafter."""
        sizes = {key: value for key, value in vars(self).items() if key != "layers"}
        sizes = {key: value for key, value in sizes.items() if value or key not in OPTIONS}
        return sizes | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": draft_vocab_size,
            "hidden_act": "silu",
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "tie_word_embeddings": False,
            LAYER_IDS: list(self.layers),
        }


def choose_layers(given: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The target layers whose inputs a new drafter reads, ascending.

    ``given`` unless it is empty; else vLLM's default, adapted if the target is too shallow.

    Raises HeadsError: not three distinct layers of the target.
    """
    usual = default_layers(num_layers)
    if given or (len(set(usual)) == 3 and min(usual) > 0):
        layers = tuple(sorted(given or usual))
    elif num_layers >= 4:
        layers = (num_layers // 4, num_layers // 2, 3 * num_layers // 4)
    else:
        layers = tuple(range(num_layers - 2, num_layers + 1))
    if len(set(layers)) != 3 or len(layers) != 3 or layers[0] < 0 or layers[-1] > num_layers:
        shown = ", ".join(map(str, layers))
        raise HeadsError(
            f"EAGLE-3 reads the inputs of three distinct layers of the target, from 0 (the "
            f"embeddings) to {num_layers} (the last layer's output); these are {shown}. Set "
            "others with --aux-layers"
        )
    return layers


class Norm(nn.RMSNorm):
    """In float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normed ``x``, float32."""
        return super().forward(x.float())


class _Layer(nn.Module):
    """The decoder layer: its input concatenates the norms of an embedding and of a state."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.shape = shape
        self.input_layernorm = Norm(hidden, shape.rms_norm_eps)
        self.hidden_norm = Norm(hidden, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, shape.rms_norm_eps)
        rows, key_rows = shape.num_attention_heads * dim, shape.num_key_value_heads * dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(2 * hidden, rows),
                "k_proj": linear(2 * hidden, key_rows),
                "v_proj": linear(2 * hidden, key_rows),
                "o_proj": linear(rows, hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(hidden, shape.intermediate_size),
                "up_proj": linear(hidden, shape.intermediate_size),
                "down_proj": linear(shape.intermediate_size, hidden),
            }
        )

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, heads, L, D], keys and values [B, key heads, L, D] of inputs [B, L, 2H]."""
        query, key, value = (
            self.self_attn[name](x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        theta = self.shape.rope_theta
        return _rotated(query, positions, theta), _rotated(key, positions, theta), value

    def after(self, mixed: Tensor, states: Tensor) -> Tensor:
        """The layer's output [B, L, H], from the attention output [B, heads, L, D]."""
        states = states + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        x, mlp = self.post_attention_layernorm(states), self.mlp
        return states + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


class EagleDrafter(nn.Module):
    """A drafter that computes K steps of every chain of a text.

    Attributes:
        num_heads: K, as for heads.
        vocab_size: the target's.
        token_map: int64 [V_draft], the target's id of each draft token, ascending; None: all.
        embedding: the target's [>= V, H]; bound, not stored.
        frozen_lm_head: whether the LM head is not trained.

    """

    token_map: Tensor | None
    lm_head_bias: None = None
    shared_lm_head = False
    frozen_lm_head = False

    def __init__(self, shape: EagleShape, steps: int, token_map: Tensor | None = None) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.shape, self.num_heads, self.vocab_size = shape, steps, shape.vocab_size
        self.draft_vocab_size = shape.vocab_size if token_map is None else len(token_map)
        norms = len(shape.layers) if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(Norm(hidden, shape.rms_norm_eps) for _ in range(norms))
        self.fc = nn.Linear(len(shape.layers) * hidden, hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = Norm(hidden, shape.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, self.draft_vocab_size, bias=False)
        self.register_buffer("token_map", token_map)
        self.embedding: Tensor | None = None

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head in the heads' layout, one for all steps: [1, V_draft, H]."""
        return self.lm_head.weight[None]

    def compute_logits(self, x: Tensor) -> Tensor:
        """Normed states [.., H] to logits over the draft vocabulary."""
        return self.lm_head(x)

    def forward(
        self,
        features: Tensor,  # [B, L, 3H], the target's hidden states, padded on the right
        path: Tensor,  # int64 [B, L, K], the tokens after each row
        first: int | Tensor = 0,  # the position of row 0 in its text; int64 [B] if it differs
    ) -> Tensor:
        """Normed states [B, L, K, H] of every row's chain."""
        assert self.embedding is not None, "bind the target's embedding"
        layer, (_, length, steps) = self.midlayer, path.shape
        if isinstance(first, Tensor):
            first = first[:, None, None]  # [B, 1, 1], broadcast over heads
        rows = torch.arange(length, device=features.device) + first
        states, found = self.combine(features), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            embeds = F.embedding(path[..., step], self.embedding).float()
            x, residual = self.inputs(embeds, states, rows + step)
            query, key, value = layer.keys(x, rows + step)
            keys.append(key)
            values.append(value)
            states = layer.after(_attend(query, keys, values), residual)
            found.append(self.norm(states))
            states = found[-1] if self.shape.norm_output else states
        return torch.stack(found, 2)

    def combine(self, features: Tensor) -> Tensor:
        """The states [B, L, H] of the exact entries, from the target's [B, L, 3H]."""
        if self.fc_norm:
            parts = zip(self.fc_norm, features.split(self.shape.hidden_size, -1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], -1)
        return self.fc(features)  # type: ignore[no-any-return]

    def inputs(self, embeds: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [B, L, 2H] and residual [B, L, H]; positions [L] or [B, 1, L]."""
        normed = self.midlayer.hidden_norm(states)
        x = torch.cat([self.midlayer.input_layernorm(embeds), normed], -1)
        return x, normed if self.shape.norm_before_residual else states

    def tensors(self) -> dict[str, Tensor]:
        """All stored tensors, by SafeAILab's names."""
        found = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if self.token_map is not None:
            ids = self.token_map
            known = torch.zeros(self.vocab_size, dtype=torch.bool, device=ids.device)
            found["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            found["t2d"] = known.index_fill(0, ids, True)
        return found


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a step: over the exact entries up to each row, and over the row's own chain.

    query [B, heads, L, D]; keys and values [B, key heads, L, D] of the steps so far.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    # To join the exact entries with the chain, the sum of exp(score) over the exact entries is
    # needed. It equals exp(score) / weight of any of them; entry 0's weight is read from an added
    # channel of the values, which is 1 for entry 0 and 0 for the others.
    dim, groups = query.shape[-1], keys[0].shape[1]
    wide, key, value = (F.pad(part, (0, _LANES)) for part in (query, keys[0], values[0]))
    value[:, :, 0, dim] = 1.0
    mixed = F.scaled_dot_product_attention(
        wide, key, value, is_causal=True, scale=dim**-0.5, enable_gqa=True
    ).unflatten(1, (groups, -1))  # [B, key heads, group, L, D + lanes]
    query = query.unflatten(1, (groups, -1)) * dim**-0.5

    def score(key: Tensor) -> Tensor:
        return (query * key.unsqueeze(2)).sum(-1, dtype=torch.float32)

    # minus the log of that sum; wrong if a score exceeds entry 0's by more than 85
    shift = mixed[..., dim].float().clamp_min(1e-37).log() - score(keys[0][:, :, :1])
    scores = [torch.zeros_like(shift), *(score(key) + shift for key in keys[1:])]
    weights = torch.stack(scores, -1).softmax(-1).to(mixed.dtype)  # [.., exact ones, chain]
    found = weights[..., :1] * mixed[..., :dim]
    for step, value in enumerate(values[1:], 1):
        found = found + weights[..., step, None] * value.unsqueeze(2)
    return found.flatten(1, 2)


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE over halves: x [B, heads, L, D], positions [L] or [B, 1, L]."""
    half = x.shape[-1] // 2
    scale = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None] * scale
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
