"""Small EAGLE drafters in plain torch: an independent dense forward pass of a path.

`trained_drafter` creates one that memorized a target's outputs, so that drafts are accepted;
on other texts it is random.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_medusa.training.options import (
    HeadOptions,
    StepOptions,
    TextFiles,
    TrainMachine,
    TrainOptions,
)
from vllm_medusa.training.train import train as run_training


class Layer(nn.Module):
    """One decoder layer; the first half of its input are embeddings."""

    def __init__(
        self, hidden: int, heads: int, key_heads: int, head_size: int, inputs: int | None = None
    ):
        super().__init__()
        self.heads, self.key_heads, self.head_size = heads, key_heads, head_size
        if inputs is None:
            self.input_layernorm = nn.RMSNorm(hidden, 1e-6)
            self.hidden_norm = nn.RMSNorm(hidden, 1e-6)
        inputs = inputs or 2 * hidden
        self.post_attention_layernorm = nn.RMSNorm(hidden, 1e-6)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(inputs, heads * head_size),
                "k_proj": linear(inputs, key_heads * head_size),
                "v_proj": linear(inputs, key_heads * head_size),
                "o_proj": linear(heads * head_size, hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(hidden, 2 * hidden),
                "up_proj": linear(hidden, 2 * hidden),
                "down_proj": linear(2 * hidden, hidden),
            }
        )

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of inputs [B, T, 2H]: [B, heads, T, D]."""
        attention, dim = self.self_attn, self.head_size
        query, key, value = (
            attention[name](x).unflatten(-1, (-1, dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if "q_norm" in attention:
            query, key = attention["q_norm"](query), attention["k_norm"](key)
        return rotated(query, positions), rotated(key, positions), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
        return self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        return mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE over halves, base 10,000: x [..., T, D], positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Eagle3(nn.Module):
    """The drafter; ``embedding`` is the target's.

    Attributes:
        fc_norm: norms of each of the target's hidden states before ``fc``, for EAGLE-3.1.
        norm_output: the next step's state is the normed one.
        norm_before_residual: the layer's residual is the normed state.
        window: of its attention.
        rope_factor: by which positions are divided (RoPE's type "linear").
        reads_last: it reads the target's last hidden state, without ``fc``.
        mask_token: of the entries for deeper levels, for P-EAGLE.

    """

    norm_output = norm_before_residual = reads_last = False
    window: int | None = None
    mask_token: int | None = None
    rope_factor = 1.0

    def __init__(
        self,
        embedding: Tensor,
        target_ids: Tensor,  # int64 [V_draft], ascending
        layers: Sequence[int],
        heads: int = 4,
        key_heads: int = 2,
        head_size: int = 32,
    ):
        super().__init__()
        vocab, hidden = embedding.shape
        self.vocab, self.hidden, self.layers = vocab, hidden, list(layers)
        self.register_buffer("embedding", embedding.detach().clone())
        self.register_buffer("target_ids", target_ids)
        self.fc_norm = nn.ModuleList()
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.midlayer = Layer(hidden, heads, key_heads, head_size)
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.lm_head = nn.Linear(hidden, len(target_ids), bias=False)

    @classmethod
    def load(cls, folder: Path, model: Any) -> Eagle3:
        """Stored weights in SafeAILab's names, with the default head sizes."""
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        ids = tensors.pop("d2t")
        ids = ids + torch.arange(len(ids))
        known = torch.zeros(len(tensors["t2d"]), dtype=torch.bool).index_fill(0, ids, True)
        assert torch.equal(known, tensors.pop("t2d"))
        layers = config["eagle_aux_hidden_state_layer_ids"]
        drafter = cls(model.get_input_embeddings().weight, ids, layers)
        if any(name.startswith("fc_norm.") for name in tensors):
            drafter.add_norms()
        left = drafter.load_state_dict(tensors, strict=False)
        assert sorted(left.missing_keys) == ["embedding", "target_ids"], left
        assert left.unexpected_keys == []
        return drafter

    def add_norms(self) -> None:
        """Make it EAGLE-3.1, with random norms."""
        self.fc_norm = nn.ModuleList(nn.RMSNorm(self.hidden, 1e-6) for _ in self.layers)
        self.norm_output = True
        for norm in self.fc_norm:
            nn.init.normal_(norm.weight, 1.0, 0.5)

    def like_qwen3(self) -> None:
        """Make its layer one of Qwen3, with random norms of queries and keys."""
        for name in ("q_norm", "k_norm"):
            norm = nn.RMSNorm(self.midlayer.head_size, 1e-6)
            self.midlayer.self_attn[name] = norm
            nn.init.normal_(norm.weight, 1.0, 0.5)

    def read_last(self) -> None:
        """Make it a drafter that reads the last hidden state only."""
        self.reads_last, self.layers = True, []
        del self.fc

    def draft_in_parallel(self) -> None:
        """Make it P-EAGLE, with a random state for deeper levels."""
        self.mask_token = 5
        self.mask_hidden = nn.Parameter(torch.randn(1, self.fc.in_features))

    def combine(self, features: Tensor) -> Tensor:
        """The layer's input from the target's hidden states: [..., 3H] -> [..., H]."""
        if self.reads_last:
            return features
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features)

    @torch.no_grad()
    def features(self, model: Any, ids: Tensor) -> Tensor:
        """The features of a transformers target: int64 [B, T] -> [B, T, 3H]."""
        if self.reads_last:
            return model.model(ids).last_hidden_state
        return features_of(model, ids, self.layers)[0]

    def step(
        self, tokens: Tensor, states: Tensor, past: Any = (), seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """Run entries with given tokens (int64 [B, T]) and states [B, T, H].

        ``past``: keys and values of earlier steps; ``seen``: bool [T, keys], None for causal.
        Returns normed and unnormed states, and the step's keys and values.
        """
        layer, length = self.midlayer, tokens.shape[1]
        x, residual = self.inputs(tokens, states)
        query, key, value = layer.keys(x, torch.arange(length) / self.rope_factor)
        if seen is None:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            if self.window is not None:
                seen = seen.triu(1 - self.window)
        keys = torch.cat([*(part[0] for part in past), key], 2)
        values = torch.cat([*(part[1] for part in past), value], 2)
        states = residual + layer.attend(query, keys, values, seen)
        states = states + layer.feed(layer.post_attention_layernorm(states))
        return *self.outputs(states), (key, value)

    def inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [B, T, 2H] and residual [B, T, H]."""
        embeds = self.midlayer.input_layernorm(self.embedding[tokens])
        normed = self.midlayer.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        return torch.cat([embeds, normed], -1), residual

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the LM head and the next step's state, from the layer's output."""
        normed = self.norm(states)
        return normed, normed if self.norm_output else states

    @torch.no_grad()
    def dense(self, tokens: Tensor, features: Tensor, path: Sequence[int]) -> tuple[Tensor, Any]:
        """Logits [V_draft] after a path of tokens following exact entries, and all keys and values.

        Args:
            tokens: int64 [T], the token after each exact position.
            features: [T, 3H], the target's hidden states there.
            path: the nodes' tokens.

        """
        states = self.combine(features)
        if self.mask_token is not None:  # only the path's length matters
            tokens = torch.cat([tokens, torch.full((len(path),), self.mask_token)])
            masks = self.combine(self.mask_hidden).expand(len(path), -1)
            states, path = torch.cat([states, masks]), ()
        normed, hidden, cache = self.step(tokens[None], states[None])
        for token in path:
            tokens = torch.cat([tokens, torch.tensor([token])])
            states = torch.cat([states, hidden[0, -1:]])
            normed, hidden, cache = self.step(tokens[None], states[None])
        return self.lm_head(normed[0, -1]), cache

    def save(self, folder: Path, **changes: Any) -> str:
        """Write SafeAILab's layout; ``changes`` apply to its config."""
        layer = self.midlayer
        kind = "Qwen3" if "q_norm" in layer.self_attn else "Llama"
        rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
        if self.rope_factor != 1:
            rope |= {"rope_type": "linear", "factor": self.rope_factor}
        config = {
            "architectures": [f"{kind}ForCausalLM"],
            "model_type": kind.lower(),
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.key_heads,
            "head_dim": layer.head_size,
            "vocab_size": self.vocab,
            "draft_vocab_size": len(self.target_ids),
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "eagle_aux_hidden_state_layer_ids": self.layers or None,
            "eagle_config": {"use_aux_hidden_state": False} if self.reads_last else None,
            "fc_norm": bool(self.fc_norm) or None,
            "norm_output": self.norm_output or None,
            "norm_before_residual": self.norm_before_residual or None,
            "mask_token_id": self.mask_token,
            "sliding_window": self.window,
            "layer_types": None if self.window is None else ["sliding_attention"],
            "dtype": "float32",
        }
        folder.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in (config | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(kept, indent=1))
        tensors = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        known = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, self.target_ids, True)
        tensors |= {"d2t": self.target_ids - torch.arange(len(self.target_ids)), "t2d": known}
        save_file(tensors, folder / "model.safetensors")
        return str(folder)


class Eagle1(Eagle3):
    """A drafter without auxiliary states, with the target's LM head; `train` has no such kind."""

    def __init__(self, model: Any, heads: int = 4, key_heads: int = 2, head_size: int = 32):
        embedding = model.get_input_embeddings().weight
        vocab, hidden = embedding.shape
        super().__init__(embedding, torch.arange(vocab), (0, 1))
        del self.midlayer, self.norm
        self.layers = []
        self.layer = Layer(hidden, heads, key_heads, head_size, inputs=hidden)
        self.lm_head.weight = model.lm_head.weight

    @property
    def midlayer(self) -> Layer:
        return self.layer

    def combine(self, features: Tensor) -> Tensor:
        return features

    def features(self, model: Any, ids: Tensor) -> Tensor:
        return model.model(ids).last_hidden_state.detach()

    def inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([self.embedding[tokens], states], -1))
        return x, x

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, states

    def save(self, folder: Path, **changes: Any) -> str:
        """Write SafeAILab's layout of EAGLE-1."""
        path = super().save(folder, draft_vocab_size=None, **changes)
        file = folder / "model.safetensors"
        own = {
            name.replace("layer.", "layers.0.", 1): tensor
            for name, tensor in load_file(file).items()
            if name not in ("lm_head.weight", "d2t", "t2d")
        }
        save_file(own, file)
        return path


@torch.no_grad()
def features_of(model: Any, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The inputs of a transformers target's ``layers`` [B, T, 3H], and its logits."""
    states: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            states[index] = output[0] if isinstance(output, tuple) else output

        return hook

    backbone = model.model
    hooks = [backbone.embed_tokens.register_forward_hook(keep(0))]
    hooks += [
        layer.register_forward_hook(keep(index)) for index, layer in enumerate(backbone.layers, 1)
    ]
    try:
        logits = model(ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([states[index] for index in sorted(layers)], -1), logits


def trained_drafter(
    target: str,
    model: Any,
    texts: Tensor,  # int64 [N, T], generated greedily by a target after their prompts
    prompt: int,  # prompt length
    layers: Sequence[int],
    folder: Path,
    draft_vocab: int,
    depth: int,
) -> Eagle3:
    """A drafter that `vllm-medusa train` overfits to the texts in a few seconds."""
    heads = {"num_heads": depth, "aux_layers": tuple(layers), "draft_vocab": draft_vocab}
    run_training(overfitting(target, texts, prompt, folder, epochs=70, **heads))
    return Eagle3.load(folder, model)


def overfitting(
    target: str, texts: Tensor, prompt: int, folder: Path, epochs: int, **heads: Any
) -> TrainOptions:
    """Options that train an EAGLE drafter on all of some texts in each step; see above."""
    records = folder.with_suffix(".jsonl")
    line = {"generated": [[prompt, texts.shape[1]]], "temperature": 0.0}
    with records.open("w") as file:
        for number, ids in enumerate(texts.tolist()):
            file.write(json.dumps({"index": number, "token_ids": ids, **line}) + "\n")
    return TrainOptions(
        model=target,
        files=TextFiles(data=records, output=folder, heldout_share=0.0),
        heads=HeadOptions(kind="eagle3", save_dtype="float32", **heads),
        training=StepOptions(epochs=epochs, batch_tokens=len(texts) * texts.shape[1]),
        machine=TrainMachine(device="cpu", precision="float32"),
    )
