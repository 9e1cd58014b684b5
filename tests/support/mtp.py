"""Tiny targets with multi-token-prediction (MTP) modules, and these modules in torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.mtp import as_mimo, train
from support import mla
from support.eagle import Eagle1, features_of, overfitting
from support.eagle_runs import PROMPT, Case, greedy_texts, learned_texts
from support.engines import random_prompts
from support.models import COMMON, STOPS, VOCAB, save_model
from support.runner import sized

LAYERS, WINDOW = 3, 64
# vLLM's Qwen2 layers have heads of hidden size / heads channels
SHAPE: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MIMO_CONFIG = {"architectures": ["MiMoForCausalLM"]}  # its layers are Qwen2's


class Mtp(Eagle1):
    """MiMo's module: one state is the input of the LM head and of the next step."""

    def __init__(self, model: Any):
        super().__init__(model, *SHAPE.values())
        hidden, attention = self.hidden, self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name] = nn.Linear(hidden, attention[name].weight.shape[0])
        self.layer.input_layernorm = nn.RMSNorm(hidden, 1e-6)
        self.token_layernorm = nn.RMSNorm(hidden, 1e-6)
        self.hidden_layernorm = nn.RMSNorm(hidden, 1e-6)
        self.final_layernorm = nn.RMSNorm(hidden, 1e-6)

    @torch.no_grad()
    def features(self, model: Any, ids: Tensor) -> Tensor:
        """The target's last state before its final norm: int64 [B, T] -> [B, T, H]."""
        return features_of(model, ids, [len(model.model.layers)])[0]

    def inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1])
        embeds = self.embedding[tokens] * (positions > 0)[:, None]  # nothing at position 0
        x = self.fc(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embeds)], -1))
        return self.layer.input_layernorm(x), x

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.final_layernorm(states)
        return normed, normed

    @classmethod
    def load(cls, folder: Path, model: Any) -> Mtp:
        """The module in a checkpoint."""
        drafter, own, prefix = cls(model), {}, "model.mtp_layers.0."
        inside = tuple(name for name, _ in drafter.layer.named_children())
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix).replace("input_proj.", "fc.")
                own[f"layer.{name}" if name.startswith(inside) else name] = tensor
        left = drafter.load_state_dict(own, strict=False)
        assert sorted(left.missing_keys) == ["embedding", "lm_head.weight", "target_ids"], left
        assert left.unexpected_keys == []
        return drafter


def add_module(target: Path, own: dict[str, Tensor], **changes: Any) -> None:
    """Add tensors to a saved target, and changes to its config."""
    file, config = target / "model.safetensors", target / "config.json"
    save_file(load_file(file) | own, file)
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"num_nextn_predict_layers": 1} | changes))


def make_case(folder: Path) -> Case:
    """A chaotic target whose MTP module memorized its greedy outputs, for chains of three."""

    def soften(model: Any) -> None:  # the module starts as this layer: less rounding in it
        model.model.layers[-1].self_attn.q_proj.weight.mul_(0.3)

    target, model, prompts, texts = learned_texts(
        folder, "Qwen2", num_hidden_layers=LAYERS, tune=soften, **SHAPE
    )
    heads = {"num_heads": 3, "lm_heads": "shared", "draft_vocab": 0}
    epochs = sized(250, 5)  # its acceptance is tested on V1
    train(overfitting(target, texts, PROMPT, folder / "mimo", epochs=epochs, **heads))
    drafter, made = Mtp.load(folder / "mimo", model), str(folder / "mimo")
    return Case(made, model, drafter, made, prompts, texts[:, PROMPT:].tolist())


def save_as_mimo(llama: str, folder: Path) -> str:
    """Save a Llama with tied embeddings as a MiMo whose module is its last layer; returns its path.

    Its tokens stay the same.
    """
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors, config = as_mimo(load_file(folder / "model.safetensors"), config)
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    layer, prefix = f"model.layers.{last}.", "model.mtp_layers.0."
    own = {
        name.replace(layer, prefix): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    own |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in norms}
    own[f"{prefix}input_proj.weight"] = torch.eye(hidden).repeat(1, 2)
    own["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    add_module(folder, tensors | own, **config)
    return str(folder)


@dataclass(frozen=True)
class Kind:
    """A target with an MTP module whose decoder layer has the shapes of one of the target's."""

    architecture: str  # in transformers
    settings: dict[str, Any]
    layer: int  # the target's
    prefix: str  # of the module's layer
    norms: tuple[str, ...]  # of embeddings and states, and before the LM head if there is one
    projection: str
    tune: Callable[[Any], None] | None = None  # see `save_model`
    keeps_norm: bool = False  # whether the next step's state is the normed one
    masked: bool = True  # whether the embedding at position 0 is left out
    window: int | None = None  # of the module's attention
    decoder: Callable[[Any], nn.Module] | None = None  # from a config; None: the target's class
    config: dict[str, Any] = field(default_factory=dict)  # of the checkpoint with the module


def llama_layer(config: Any) -> nn.Module:
    """A layer of Llama. vLLM's Ernie module is one: its RoPE rotates halves, Ernie's pairs."""
    own = {"rms_norm_eps": config.rms_norm_eps, "rope_parameters": config.rope_parameters}
    return LlamaDecoderLayer(LlamaConfig(**COMMON | own, attn_implementation="sdpa"), 0)


_OF_MIMO = "model.mtp_layers.0."
MIMO = Kind(
    "Qwen2",
    SHAPE,
    LAYERS - 1,
    _OF_MIMO,
    tuple(_OF_MIMO + name for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")),
    f"{_OF_MIMO}input_proj",
    config=MIMO_CONFIG,
)
GLM = Kind(
    "Glm4Moe",
    {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    },
    LAYERS - 1,
    f"model.layers.{LAYERS}.",
    tuple(f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "shared_head.norm")),
    f"model.layers.{LAYERS}.eh_proj",
)
DEEPSEEK = replace(
    GLM,
    architecture="DeepseekV3",
    settings=mla.SHAPE | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    tune=mla.soften,
    keeps_norm=True,
)
ERNIE = Kind(
    "Ernie4_5_Moe",
    {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    0,
    "model.mtp_block.0.",
    ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
    "model.mtp_linear_proj.0",
    decoder=llama_layer,
)
GLM_LITE = replace(
    GLM,
    architecture="Glm4MoeLite",
    settings=mla.SHAPE | {"mlp_layer_types": ["dense", *["sparse"] * LAYERS]},
    tune=mla.soften,
)
HUNYUAN = Kind(
    "HYV3",
    {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "mlp_layer_types": ["dense", *["sparse"] * LAYERS],
        # for vLLM, as in published checkpoints
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 64,
        "route_norm": True,
        "qk_norm": True,
    },
    LAYERS - 1,
    f"model.layers.{LAYERS}.",
    tuple(f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "final_layernorm")),
    f"model.layers.{LAYERS}.eh_proj",
    keeps_norm=True,
)
EXAONE = Kind(
    "ExaoneMoe",
    {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    0,
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "mtp.fc",
    keeps_norm=True,
    masked=False,
    window=WINDOW,
    decoder=lambda config: ExaoneMoeDecoderLayer(config, 0),
)


KINDS = {  # by the fuzzer's names
    "mimo": MIMO,
    "glm": GLM,
    "ernie": ERNIE,
    "exaone": EXAONE,
    "hunyuan": HUNYUAN,
    "deepseek_mtp": DEEPSEEK,
    "glm_lite": GLM_LITE,
}


def save_random(folder: Path, kind: Kind, **changes: Any) -> str:
    """Save a chaotic target with a random module; returns its path."""
    settings = {"eos_token_id": list(STOPS), "num_hidden_layers": LAYERS} | kind.settings | changes
    target = save_model(folder, kind.architecture, tune=kind.tune, **settings)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    layer, hidden = f"model.layers.{kind.layer}.", COMMON["hidden_size"]
    shapes = {
        name.replace(layer, kind.prefix): tensor.shape
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    shapes |= {f"{name}.weight": (hidden,) for name in kind.norms}
    shapes |= {f"{kind.projection}.weight": (hidden, 2 * hidden)}
    own = {
        name: 0.3 * torch.randn(shape, generator=generator) + ("norm" in name)
        for name, shape in shapes.items()
    }
    add_module(folder, own, **kind.config)
    return target


class _Entries:
    """What a layer of transformers would cache."""

    keys: Tensor  # [1, heads, T, D]; the latents of MLA
    values: Tensor  # the rotated channels of MLA

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


class Module:
    """A saved module, with a layer of transformers; `features` and `dense` are as in `Eagle3`."""

    target_ids = torch.arange(VOCAB)

    def __init__(self, target: str, kind: Kind):
        def load(**changes: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **changes)

        self.kind, self.window, self.model = kind, kind.window, load().eval()
        self.tensors = load_file(Path(target, "model.safetensors"))
        if kind.decoder is None:
            self.layer = load(num_hidden_layers=LAYERS + 1).eval().model.layers[LAYERS]
            return
        self.layer = kind.decoder(self.model.config).eval()
        start = len(kind.prefix)
        self.layer.load_state_dict(
            {n[start:]: t for n, t in self.tensors.items() if n.startswith(kind.prefix)}
        )

    def features(self, model: Any, ids: Tensor) -> Tensor:
        """The target's last normed states: int64 [B, T] -> [B, T, H]."""
        with torch.no_grad():
            return model.model(ids).last_hidden_state

    def norm(self, place: int, states: Tensor) -> Tensor:
        weight = self.tensors[f"{self.kind.norms[place]}.weight"]
        return F.rms_norm(states, weight.shape, weight, self.model.config.rms_norm_eps)

    def step(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor, _Entries]:
        """Run entries with given tokens (int64 [T]) and states [T, H].

        Returns the input of the LM head and the next step's state, both [T, H], and the entries.
        """
        positions = torch.arange(len(tokens))
        embeds = self.model.get_input_embeddings()(tokens)
        if self.kind.masked:
            embeds = embeds * (positions > 0)[:, None]
        both = torch.cat([self.norm(0, embeds), self.norm(1, states)], -1)
        x = F.linear(both, self.tensors[f"{self.kind.projection}.weight"])[None]
        rotation, entries = self.model.model.rotary_emb(x, positions[None]), _Entries()
        seen = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
        seen = seen if self.kind.window is None else seen.triu(1 - self.kind.window)
        states = self.layer(
            x, attention_mask=seen, position_embeddings=rotation, past_key_values=entries
        )[0]
        normed = self.norm(2, states) if len(self.kind.norms) > 2 else states
        return normed, normed if self.kind.keeps_norm else states, entries

    @torch.no_grad()
    def dense(self, tokens: Tensor, features: Tensor, path: Sequence[int]) -> tuple[Tensor, Any]:
        """Logits [V] after a path of tokens following exact entries, and all keys and values."""
        normed, hidden, entries = self.step(tokens, features)
        for token in path:
            tokens = torch.cat([tokens, torch.tensor([token])])
            features = torch.cat([features, hidden[-1:]])
            normed, hidden, entries = self.step(tokens, features)
        return self.model.lm_head(normed[-1]), (entries.keys, entries.values)


def random_case(folder: Path, kind: Kind, count: int = 0) -> Case:
    """A target with a random module, and ``count`` prompts, whose outputs are to be planted."""
    target = save_random(folder, kind)
    module: Any = Module(target, kind)
    prompts, outputs = random_prompts(count, VOCAB, PROMPT, PROMPT), []
    if count:
        outputs = greedy_texts(module.model, prompts)[:, PROMPT:].tolist()
    return Case(target, module.model, module, target, prompts, outputs)
