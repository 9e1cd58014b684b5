"""EAGLE-3 drafters between training and serving layouts, with unchanged tensors.

All have the same tensors. SafeAILab calls the layer ``midlayer`` and stores pickles, speculators
calls it ``layers.0``. The target's layers that a drafter reads are in
``eagle_aux_hidden_state_layer_ids``: at the config's top level, where vLLM looks first, a number
means that layer's input. In SpecForge's ``eagle_config``, as SGLang reads it, numbers mean outputs
if the first is 1. Without numbers, both use the same default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_medusa.convert.heads import Output
from vllm_medusa.heads.eagle_checkpoint import default_layers
from vllm_medusa.heads.eagle_tensors import LAYER_IDS, bare_names, flat_config
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.model import HeadsError

DRAFTER_FORMATS = {  # layer name, file name, and architecture in the config
    "native": ("midlayer.", "model.safetensors", "LlamaForCausalLMEagle3"),
    "safeailab": ("midlayer.", "pytorch_model.bin", "LlamaForCausalLM"),
    "specforge": ("midlayer.", "model.safetensors", "LlamaForCausalLMEagle3"),
    "speculators": ("layers.0.", "model.safetensors", "LlamaForCausalLM"),
}
_LAYER = "layers.0."  # as vLLM calls it, see `bare_names`
_DRAFT_TOKENS = 5  # draft tokens; speculators' config requires a number, servers can override it
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SUPPORTED = {"specforge": ("fc_norm", "norm_output")}  # since September 2026


def write_drafter(to: str, files: CheckpointFiles, target: CheckpointFiles | None) -> Output:
    """Write a drafter in a layout, a key of `DRAFTER_FORMATS`.

    Raises:
        HeadsError: An EAGLE-1 drafter, more than one layer, values that are not finite, or
            something that the layout does not support.

    """
    tensors, notes = _read_tensors(files), list[str]()
    config = _read_config(files, notes)
    if config.get("draft_vocab_size") in (None, config.get("vocab_size")) and "d2t" in tensors:
        if bool(tensors["d2t"].any()):
            raise HeadsError(f"{files.label}: its d2t permutes a full vocabulary")
        tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
        notes.append("its d2t, of a full vocabulary, is omitted: vLLM does not support it")
    variants = [key for key in _VARIANTS if config.get(key) and key not in _SUPPORTED.get(to, ())]
    if "sliding_attention" in (config.get("layer_types") or ()):
        variants.append("sliding_attention")
    if to in ("safeailab", "specforge") and variants:
        name = {"safeailab": "SafeAILab's code", "specforge": "SpecForge"}[to]
        raise HeadsError(
            f"{files.label} uses {', '.join(variants)}, which {name} does not support. Use "
            "native or speculators"
        )
    layer, file, architecture = DRAFTER_FORMATS[to]
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    name = config.get("base_model_name_or_path") or verifier.get("name_or_path") or ""
    config |= {"architectures": [architecture], "model_type": "llama"}
    if to == "specforge":
        trained = ((config.get("medusa") or {}).get("target") or {}).get("num_layers")
        depth = trained if target is None else target.config.get("num_hidden_layers", trained)
        config["eagle_config"] = _eagle_config(config.get(LAYER_IDS), depth, notes)
    elif to == "speculators":
        config = _speculators_config(config, name)
    named = {name.replace(_LAYER, layer, 1): tensor for name, tensor in tensors.items()}
    return Output(file, named, config, notes)


def _read_tensors(files: CheckpointFiles) -> dict[str, Tensor]:
    """A drafter's tensors by vLLM's names."""
    names = {stored: name for name, stored in bare_names(files).items()}
    found = names.values()
    for name in found:
        if name == "mask_hidden" or name.endswith(("q_norm.weight", "k_norm.weight")):
            raise HeadsError(
                f"{files.label} has {name!r}: drafters with parallel levels (P-EAGLE) or layers of "
                "Qwen3 can't be converted. Use it as it is"
            )
    if not any(name.startswith(_LAYER) for name in found) or "lm_head.weight" not in found:
        raise HeadsError(
            f"{files.label} is not an EAGLE-3 drafter of one layer with an LM head. Drafters of "
            "EAGLE-1 and 2 have one layout, which needs no conversion"
        )
    if any(name.startswith("layers.") and not name.startswith(_LAYER) for name in found):
        raise HeadsError(f"{files.label} has several layers, which no other layout supports")
    return {names[name]: tensor for name, tensor in files.finite_tensors(names)}


def _read_config(files: CheckpointFiles, notes: list[str]) -> dict[str, Any]:
    """A drafter's config, flat, with the layer numbers at the top level."""
    config = flat_config(files.config)
    nested = config.pop("eagle_config", None) or {}
    if not isinstance(nested, Mapping) or not nested.get("use_aux_hidden_state", True):
        raise HeadsError(
            f"{files.label} reads only the last hidden state, which other layouts do not support. "
            "Use it as it is"
        )
    if LAYER_IDS not in config and (ids := nested.get(LAYER_IDS)):
        outputs = ids[0] == 1
        config[LAYER_IDS] = [layer + outputs for layer in ids]
        notes.append(
            f"its eagle_config has the layers {ids}, read as the "
            f"{'outputs' if outputs else 'inputs'} of layers, as in SGLang"
        )
    return config | {key: nested[key] for key in _VARIANTS if key in nested and key not in config}


def _eagle_config(layers: list[int] | None, depth: int | None, notes: list[str]) -> dict[str, Any]:
    """SpecForge's config; ``depth`` is the target's number of layers, if known."""
    if not layers or (depth is not None and layers == default_layers(depth)):
        return {"use_aux_hidden_state": True}
    if layers[0] != 2:
        notes.append(
            f"it reads the inputs of layers {layers}: SGLang reads the numbers as outputs, newer "
            "versions only if the first is 1; check the log of your version"
        )
    return {"use_aux_hidden_state": True, LAYER_IDS: [layer - 1 for layer in layers]}


def _speculators_config(config: dict[str, Any], target: str) -> dict[str, Any]:
    """The config of vLLM's speculators library; its target name may need correction."""
    kept = {"medusa", "base_model_name_or_path", "target_hidden_size", LAYER_IDS}
    top_level = {*kept, "draft_vocab_size", *_VARIANTS}
    layer_config = {key: value for key, value in config.items() if key not in top_level}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_TOKENS}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        **{key: bool(config.get(key)) for key in _VARIANTS},
        "transformer_layer_config": layer_config,
        **{key: config[key] for key in kept if key in config},
    }
