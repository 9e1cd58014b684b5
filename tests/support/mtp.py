"""A tiny MiMo target with its multi-token-prediction (MTP) module, and that module in torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from support import mla
from support.eagle import Eagle1, features_of
from support.eagle_runs import PROMPT, Case, learned_texts
from support.models import COMMON, STOPS, save_model

LAYERS = 3
# vLLM's Qwen2 layers have heads of hidden size / heads channels
SHAPE: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


MIMO = {"architectures": ["MiMoForCausalLM"]}  # its layers are Qwen2's


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

    def fit(self, model: Any, texts: Tensor) -> None:
        """Memorize texts, int64 [N, T], for two levels."""
        features, length = self.features(model, texts)[:, :-1], texts.shape[1] - 1
        ones = torch.ones(length, length, dtype=torch.bool)
        seen = torch.cat([ones.tril(-1), torch.eye(length, dtype=torch.bool)], 1)  # level 2
        free = [p for name, p in self.named_parameters() if name != "lm_head.weight"]
        optimizer = torch.optim.Adam(free, 4e-3)
        for _ in range(250):
            first, _, cache = self.step(texts[:, 1:], features)
            second, _, _ = self.step(texts[:, 1:], first.roll(1, 1), (cache,), seen)
            states = torch.cat([first[:, :-1], second[:, 1:-1]], 1)
            labels = torch.cat([texts[:, 2:], texts[:, 3:]], 1)
            loss = F.cross_entropy(self.lm_head(states).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def add_to(self, target: Path) -> None:
        """Make a Qwen2 checkpoint one of MiMo with this module."""
        own: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            name = name.removeprefix("layer.").replace("fc.", "input_proj.")
            own[f"model.mtp_layers.0.{name}"] = tensor
        for name in ("lm_head.weight", "embedding", "target_ids"):  # the target's
            del own[f"model.mtp_layers.0.{name}"]
        add_module(target, own, **MIMO)


def add_module(target: Path, own: dict[str, Tensor], **changes: Any) -> None:
    """Add tensors to a saved target, and changes to its config."""
    file, config = target / "model.safetensors", target / "config.json"
    save_file(load_file(file) | own, file)
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"num_nextn_predict_layers": 1} | changes))


def make_case(folder: Path) -> Case:
    """A chaotic target whose MTP module memorized some of its greedy outputs."""
    target, model, prompts, texts = learned_texts(
        folder, "Qwen2", num_hidden_layers=LAYERS, **SHAPE
    )
    torch.manual_seed(1)
    drafter = Mtp(model)
    drafter.fit(model, texts)
    drafter.add_to(folder / "target")
    return Case(target, model, drafter, target, prompts, texts[:, PROMPT:].tolist())


@dataclass(frozen=True)
class Kind:
    """A target with an MTP module whose decoder layer is like one of the target's."""

    architecture: str  # in transformers
    settings: dict[str, Any]
    layer: int  # the target's
    prefix: str  # of the module's layer
    norms: tuple[str, ...]
    projection: str
    tune: Callable[[Any], None] | None = None  # see `save_model`


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
    settings=mla.SHAPE | {"topk_method": "noaux_tc"},
    tune=mla.soften,
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
)


def save_random(folder: Path, kind: Kind) -> str:
    """Save a chaotic target with a random module; returns its path."""
    target = save_model(
        folder,
        kind.architecture,
        eos_token_id=list(STOPS),
        num_hidden_layers=LAYERS,
        tune=kind.tune,
        **kind.settings,
    )
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
    add_module(folder, own)
    return target
