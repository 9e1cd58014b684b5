"""Layouts of EAGLE drafters: which one a checkpoint has, and the tensors that it must or may have.

vLLM's modules (`llama_eagle.py`, `llama_eagle3.py`, `qwen3_eagle3.py`) leave a parameter without a
tensor at its initial value, and skip some tensors whose option is not set, both without an error.
Drafts would then be worse and nothing would say why, so `problems` names such tensors.

To add a layout, add its architecture to `_MODULES` and its tensors to `Layout.tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.model import HeadsError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MIN_WINDOW = 64  # at most 32 tokens of plain steps, not yet read by the drafter, use the window
P_EAGLE = "P-EAGLE"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # keys that vLLM reads, in its order
_COUNTS = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "draft_vocab_size", "target_hidden_size", "sliding_window",
)  # fmt: skip
_ALWAYS = ("hidden_size", "vocab_size", "num_hidden_layers")  # None is not allowed
_LISTS = ("layer_types", LAYER_IDS)
_ROPE_KEYS = ("rope_parameters", "rope_scaling")  # of transformers 5, and before
_ROPE_TYPES = (  # those of vLLM that were tested, or rotate like them
    "default", "linear", "dynamic", "ntk", "yarn", "deepseek_yarn", "llama3", "longrope",
)  # fmt: skip

_MODULES = {  # architecture, by vLLM's rules -> the layer's kind
    "EagleLlamaForCausalLM": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}
_REMEDIES = {  # part of an unexpected tensor's name ("$": its end) -> what to do
    "fc_norm.": 'If it was trained with these norms, set "fc_norm": true at the top level of its '
    "config.json",
    "input_norm.": 'If it was trained with this norm, set "norm_before_fc": true at the top level '
    "of its config.json",
    "_norm.": 'If its layers are those of Qwen3, set "architectures": ["Eagle3Qwen3ForCausalLM"] '
    "in its config.json",
    "_proj.bias$": 'If it was trained with biases, set "attention_bias" or "mlp_bias": true in its '
    "config.json",
    "fc.weight$": 'If it was trained on several layers, remove "use_aux_hidden_state": false from '
    "its config.json",
    "d2t$": "`vllm-medusa convert --to native` removes a map of the full vocabulary",
}


class Expected(NamedTuple):
    """A tensor that vLLM reads."""

    shape: tuple[int | None, ...]  # None: the config does not say
    required: bool = True


@dataclass(frozen=True)
class Layout:
    """The architecture and sizes of a drafter, read from its config as vLLM does."""

    names: Mapping[str, str]  # vLLM's -> stored
    shapes: Mapping[str, tuple[int, ...]]  # by vLLM's names
    config: Mapping[str, Any]  # flat, see `flat_config`
    method: str  # vLLM's: "eagle3", or "eagle" for EAGLE-1 and 2
    kind: str  # "EAGLE-1 or 2", "EAGLE-3", "EAGLE-3.1" or `P_EAGLE`
    layout: str  # "SafeAILab", "SpecForge" (SGLang's and NVIDIA's too), "speculators" or "native"
    architecture: str  # by vLLM's rules
    module: str | None  # "llama" or "qwen3"; None: not in vLLM, or not supported here
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_states: int  # number of the target's hidden states that it reads
    reads_last: bool  # whether it reads only the target's last hidden state, without ``fc``
    window: int | None  # of its attention; None: everything
    norm_before_fc: bool
    fc_norm: bool

    @classmethod
    def read(cls, files: CheckpointFiles, method: str | None = None) -> Layout:
        """The layout of a checkpoint, from its config.json and its tensors' headers.

        ``method`` is vLLM's; None: it follows from the tensors.

        Raises HeadsError: not an EAGLE drafter.
        """
        config, names = files.config, bare_names(files)
        specs = files.specs(names.values())
        shapes = {name: specs[stored].shape for name, stored in names.items()}
        if "mask_hidden" in shapes:  # vLLM reads it flat
            shapes["mask_hidden"] = (math.prod(shapes["mask_hidden"]),)
        flat = flat_config(config)
        _check_types(files.label, flat, config.get("architectures"))
        hidden: Any = flat.get("hidden_size")
        vocab: Any = flat.get("vocab_size")
        extra = flat.get("eagle_config")
        extra = extra if isinstance(extra, Mapping) else {}
        reads_last = extra.get("use_aux_hidden_state") is False
        if not {type(hidden), type(vocab)} == {int} or not (
            "fc.weight" in names or (reads_last and "layers.0.hidden_norm.weight" in names)
        ):
            raise HeadsError(
                f"{files.label} is not an EAGLE drafter, which has an fc.weight and a config"
            )
        wide = flat.get("target_hidden_size") or hidden
        if method is None:
            first = shapes.get("fc.weight") == (hidden, 2 * wide)
            method = "eagle" if first and "lm_head.weight" not in shapes else "eagle3"
        architecture, module = _module(config, method)
        parallel = "mask_hidden" in shapes or "peagle" in architecture.lower()
        parallel |= any(flat.get(key) is not None for key in _MASK_TOKENS)
        eagle3 = method == "eagle3"
        fc_norm = eagle3 and bool(flat.get("fc_norm"))
        kind = "EAGLE-3.1" if fc_norm or flat.get("norm_output") else "EAGLE-3"
        slides = "sliding_attention" in (flat.get("layer_types") or ())
        return cls(
            names=names,
            shapes=shapes,
            config=flat,
            method=method,
            kind=P_EAGLE if parallel else kind if eagle3 else "EAGLE-1 or 2",
            layout=_layout(config, architecture),
            architecture=architecture,
            module=module,
            hidden_size=hidden,
            target_hidden_size=wide,
            vocab_size=vocab,
            draft_vocab_size=flat.get("draft_vocab_size") or vocab,
            num_states=_num_states(flat, extra, module) if eagle3 else 1,
            reads_last=eagle3 and reads_last,
            window=flat.get("sliding_window") if slides else None,
            norm_before_fc=eagle3 and bool(extra.get("norm_before_fc", flat.get("norm_before_fc"))),
            fc_norm=fc_norm,
        )

    @property
    def reads_layers(self) -> bool:
        """Whether it reads several of the target's layers."""
        return self.method == "eagle3" and not self.reads_last

    @property
    def layers(self) -> list[int] | None:
        """Target layers whose inputs it reads; None: not stated, or none."""
        return named_layers(self.config) if self.reads_layers else None

    @property
    def mask_token(self) -> Any:
        """The token of P-EAGLE's entries for deeper levels; None if the config has none."""
        given = (self.config.get(key) for key in _MASK_TOKENS)
        return next((token for token in given if token is not None), None)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        maps = ("d2t", "t2d")
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in maps)

    @property
    def features(self) -> list[str]:
        """What it has beyond the plain layout of its kind."""
        layers, config = self.config.get("num_hidden_layers", 1), self.config
        known = {
            "reads only the target's last hidden state": self.reads_last,
            f"{self.num_states} norms before fc": self.fc_norm,
            "one norm before fc": self.norm_before_fc,
            "the next step reads normed states": bool(config.get("norm_output")),
            "the residual is normed": bool(config.get("norm_before_residual")),
            f"sliding window of {self.window}": self.window is not None,
            f"{layers} layers": layers != 1,
            "Qwen3's layer": self.module == "qwen3",
            "parallel levels": self.kind == P_EAGLE,
        }
        return [text for text, found in known.items() if found]

    def tensors(self) -> dict[str, Expected]:
        """The tensors that vLLM reads, by its names."""
        config, hidden, wide = self.config, self.hidden_size, self.target_hidden_size
        inputs, eagle3 = self.num_states * wide, self.method == "eagle3"
        part = self.draft_vocab_size != self.vocab_size
        found = {"embed_tokens.weight": Expected((None, hidden), hidden != wide)}
        if not eagle3:
            found["fc.weight"] = Expected((hidden, 2 * hidden))
        elif not self.reads_last:
            found["fc.weight"] = Expected((hidden, inputs))
            if self.kind == P_EAGLE:
                found["mask_hidden"] = Expected((inputs,))
            if self.norm_before_fc:
                found["input_norm.weight"] = Expected((inputs,))
            for state in range(self.num_states if self.fc_norm else 0):
                found[f"fc_norm.{state}.weight"] = Expected((wide,))
        if eagle3:
            found["norm.weight"] = Expected((hidden,))
            found["lm_head.weight"] = Expected((self.draft_vocab_size, hidden), part)
            found["t2d"] = Expected((None,), required=False)
            if part:
                found["d2t"] = Expected((self.draft_vocab_size,))
        for index in range(config.get("num_hidden_layers", 1)):
            layer = self._layer(eagle3 and index == 0)
            if eagle3 or index > 0:
                layer["input_layernorm.weight"] = Expected((hidden,))
            if eagle3:
                layer["hidden_norm.weight"] = Expected((hidden,), index == 0)
            found |= {f"layers.{index}.{name}": each for name, each in layer.items()}
        return found

    def _layer(self, twice: bool) -> dict[str, Expected]:
        """A decoder layer; ``twice``: its attention reads an embedding and a state."""
        config, hidden, qwen = self.config, self.hidden_size, self.module == "qwen3"
        heads, inner = config.get("num_attention_heads"), config.get("intermediate_size")
        groups = config.get("num_key_value_heads") or heads
        dim = config.get("head_dim") or (heads and hidden // heads)
        rows = {"q": heads and heads * dim, "k": groups and groups * dim}
        linear = {
            f"self_attn.{name}_proj": (rows.get(name, rows["k"]), (1 + twice) * hidden)
            for name in "qkv"
        } | {
            "self_attn.o_proj": (hidden, rows["q"]),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found = {f"{name}.weight": Expected(shape) for name, shape in linear.items()}
        for name, shape in linear.items():
            option = "mlp_bias" if name.startswith("mlp.") else "attention_bias"
            of_qwen = name.removeprefix("self_attn.")[0] in "qkv"
            if config.get(option) and (of_qwen or not qwen):
                found[f"{name}.bias"] = Expected(shape[:1])
        found["post_attention_layernorm.weight"] = Expected((hidden,))
        if qwen:
            norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            found |= dict.fromkeys(norms, Expected((dim,)))
        return found

    def refusals(self) -> Iterator[str]:
        """Reasons why it can't be served with trees on any target, with remedies."""
        types, mask = self.config.get("layer_types") or (), self.mask_token
        if self.kind == P_EAGLE and not (type(mask) is int and 0 <= mask < self.vocab_size):
            yield (
                "it drafts all levels in parallel (P-EAGLE), but the mask token in its config.json "
                f"({', '.join(_MASK_TOKENS)}) is {mask}. Set mask_token_id to the one that it was "
                "trained with"
            )
        if self.kind == P_EAGLE and self.reads_last:
            yield (
                "it drafts all levels in parallel (P-EAGLE) from the target's last hidden state "
                "alone, which vLLM does not support. Use another drafter"
            )
        if self.module is None:
            known = ", ".join(sorted(_MODULES))
            yield (
                f"its architecture is {self.architecture}; trees support only {known}. Correct its "
                'config.json, or omit "tree"'
            )
        if (act := self.config.get("hidden_act", "silu")) != "silu":
            yield (
                f"its activation (hidden_act) is {act!r}; vLLM's module has only 'silu'. Use "
                "another drafter"
            )
        rope = rope_of(self.config)
        if parts := [key for key, value in rope.items() if isinstance(value, Mapping)]:
            yield (
                f"its rope_parameters are nested by layer type ({', '.join(parts)}), which vLLM's "
                "module does not read. Put those of its layers directly into rope_parameters"
            )
        elif rope["rope_type"] not in _ROPE_TYPES:
            yield (
                f"its rope_type is {rope['rope_type']!r}; trees support {', '.join(_ROPE_TYPES)}. "
                "Use another drafter"
            )
        if self.norm_before_fc and self.fc_norm:
            yield (
                "its config has both norm_before_fc and fc_norm, which are mutually exclusive. "
                "Keep the one that it was trained with"
            )
        if self.window is not None and self.window < MIN_WINDOW:
            yield f"it has a sliding window of {self.window}; trees need at least {MIN_WINDOW}"
        if len(set(types[: self.config.get("num_hidden_layers", 1)])) > 1:
            yield 'its layers have different windows, which trees do not support. Omit "tree"'
        if self.reads_last and self.hidden_size != self.target_hidden_size:
            yield (
                f"it reads the target's last hidden state without fc, but has another width "
                f"({self.hidden_size}). It belongs to another target"
            )

    def problems(self) -> Iterator[str]:
        """Tensors that are missing, unexpected or of another shape, each with a remedy."""
        if self.module is None:
            return
        expected = self.tensors()
        for name, (shape, required) in expected.items():
            found = self.shapes.get(name)
            if found is None and required:
                remedy = "get both from their source again"
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    remedy = (
                        "if its layers are Llama's, not Qwen3's, replace Qwen3 in its "
                        "architectures, or qwen3 in the model_type of its transformer_layer_config"
                    )
                elif name == "mask_hidden":
                    remedy = (
                        "if it drafts level by level, remove the mask token "
                        f"({', '.join(_MASK_TOKENS)}) from its config.json"
                    )
                yield (
                    f'it has no "{name}" {_shown(shape)}, which its config requires; vLLM would '
                    "use initial values. The checkpoint is incomplete, or its config.json belongs "
                    f"to another one: {remedy}"
                )
            elif found is not None and not _matches(found, shape):
                yield (
                    f'"{name}" has the shape {list(found)}; its config implies {_shown(shape)}. It '
                    "belongs to another target, or to another method"
                )
        for name in sorted(self.shapes.keys() - expected.keys()):
            if "rotary_emb." not in name:  # computed by vLLM
                remedy = next(
                    (text for part, text in _REMEDIES.items() if part in f"{name}$"),
                    'Use another drafter, or vLLM\'s own chains: omit the "tree"',
                )
                yield f'it has "{name}", which vLLM does not read with its config. {remedy}'


def _check_types(label: str, flat: Mapping[str, Any], architectures: Any) -> None:
    """Refuse values in a config whose type would raise an error later, or be misread."""
    config = {**flat, "architectures": architectures}

    def is_list(value: Any) -> bool:
        return isinstance(value, list | tuple)

    rules: dict[str, tuple[Sequence[str], Callable[[Any], bool]]] = {
        "a positive integer": (_COUNTS, lambda value: type(value) is int and value > 0),
        "a list": (_LISTS, is_list),
        "an object": (_ROPE_KEYS, lambda value: isinstance(value, Mapping)),
        "a list of names": (
            ["architectures"],
            lambda value: is_list(value) and all(isinstance(each, str) for each in value),
        ),
    }
    for wanted, (keys, is_valid) in rules.items():
        for key in keys:
            value = config.get(key)
            allowed = value is None and (key not in config or key not in _ALWAYS)
            if not allowed and not is_valid(value):
                raise HeadsError(
                    f"{label}: its config.json has {key} = {value!r}; it must be {wanted}. Correct "
                    "it, or get the file from its source again"
                )


def bare_names(files: CheckpointFiles) -> dict[str, str]:
    """A drafter's tensors: vLLM's names -> stored names."""
    bare = ((name.rsplit("model.", 1)[-1], name) for name in files.files)
    return {name.replace("midlayer.", "layers.0.", 1): stored for name, stored in bare}


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config with speculators' nested parts flattened, as vLLM reads it."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    left_out = {"transformer_layer_config", "architectures", "speculators_config"}
    left_out |= {"speculators_model_type", "speculators_version"}
    outer = {key: value for key, value in config.items() if key not in left_out}
    outer = {key: value for key, value in outer.items() if value is not None}
    return {**inner, "norm_before_residual": True, **outer}


def named_layers(config: Mapping[str, Any]) -> list[int] | None:
    """The target's layers in a drafter's config; None if absent. By vLLM's rule."""
    extra = config.get("eagle_config")
    ids = config.get(LAYER_IDS) or (extra.get(LAYER_IDS) if isinstance(extra, Mapping) else None)
    return list(ids) if ids else None


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of RoPE in a flat config, read as transformers 5 reads old and new keys."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    found = found if isinstance(found, Mapping) else {}
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    given = {key: value for key, value in outer.items() if value is not None}
    return {"rope_type": found.get("type", "default"), **given, **found}


def _module(config: Mapping[str, Any], method: str) -> tuple[str, str | None]:
    """The architecture that vLLM derives from a config.json, and its module in `_MODULES`."""
    name = next(iter(config.get("architectures") or ()), "")
    if (trained := config.get("speculators_model_type")) is not None:
        inner = (config.get("transformer_layer_config") or {}).get("model_type", "llama")
        kind = {"llama": "Llama", "qwen3": "Qwen3"}.get(inner)
        name = f"{trained} of speculators with a layer of {inner}"
        if kind is not None and trained in ("eagle3", "peagle"):
            name = f"{trained.capitalize()}{kind}ForCausalLM"
    elif method == "eagle":
        name = name if name.startswith("Eagle") else f"Eagle{name}"
    elif not (name.startswith(("Eagle3", "PEagle", "Peagle")) or name.endswith("Eagle3")):
        name = f"Eagle3{name}"
    return name, _MODULES.get(name)


def _layout(config: Mapping[str, Any], architecture: str) -> str:
    if "speculators_model_type" in config:
        return "speculators"
    if "eagle_config" in config or architecture == "PEagleDraftModel":
        return "SpecForge"
    if architecture.endswith("Eagle3"):
        return "native" if config.get(LAYER_IDS) else "SpecForge"
    return "SafeAILab"


def _num_states(config: Mapping[str, Any], extra: Mapping[str, Any], module: str | None) -> int:
    """The number of hidden states that vLLM's module reads."""
    if module == "qwen3":
        ids = config.get(LAYER_IDS) or extra.get(LAYER_IDS)
        given = config.get("num_aux_layers") or config.get("num_aux_hidden_states")
    else:
        ids, given = extra.get(LAYER_IDS), config.get("num_aux_hidden_states")
    return given or len(ids or "123")


def _matches(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(found, shape, strict=True)
    )


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"
