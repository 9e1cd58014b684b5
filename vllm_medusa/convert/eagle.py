"""EAGLE-3 drafters between the layouts of those who train and serve them; tensors bit by bit.

All have the same tensors. SafeAILab calls the layer ``midlayer`` and stores pickles, as speculators
calls it ``layers.0`` and stores safetensors. Whose inputs of the target's layers are read stands in
``eagle_aux_hidden_state_layer_ids``: at the top, as vLLM reads it first, a layer's number means its
input. SpecForge's ``eagle_config`` numbers outputs where the first is 1, as SGLang takes it to, and
without numbers both take the same default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.convert.heads import Output
from vllm_medusa.heads.eagle import LAYER_IDS, default_layers, flat_config
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.model import HeadsError

_DRAFTED = 5  # tokens that speculators' config has to name; servers may be told another number
_OWN = "midlayer."
_THEIRS = "layers.0."
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Drafter:
    """A drafter as it is stored."""

    label: str
    tensors: dict[str, Tensor]  # by SafeAILab's names
    config: dict[str, Any]  # flat: what vLLM makes the module from, and what others added
    target: str  # what it says it was trained for; "": nothing
    num_layers: int | None  # of that target, where it is known
    notes: tuple[str, ...]

    @classmethod
    def read(cls, files: CheckpointFiles, target: Mapping[str, Any] | None = None) -> Drafter:
        """Load a drafter; ``target`` is its target's config.

        Raises:
            HeadsError: An EAGLE-1 drafter, more than one layer, or values that are not finite.

        """
        names = {_canonical(name): name for name in files.files}
        if not any(name.startswith(_OWN) for name in names) or "lm_head.weight" not in names:
            raise HeadsError(
                f"{files.label} is no EAGLE-3 drafter of one layer with an LM head. Those of "
                "EAGLE-1 and 2 have one layout, which needs no conversion"
            )
        if any(name.startswith("layers.") for name in names):
            raise HeadsError(f"{files.label} has several layers, which no other layout has a place")
        original = {name: canonical for canonical, name in names.items()}
        tensors = {}
        for name, tensor in files.tensors(original):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise HeadsError(f"{files.label}: {name!r} holds NaN or infinity. Retrain it")
            tensors[original[name]] = tensor
        config, notes = flat_config(files.config), []
        nested = config.pop("eagle_config", None) or {}
        if not isinstance(nested, Mapping) or not nested.get("use_aux_hidden_state", True):
            raise HeadsError(f"{files.label} reads the last state only, which is not converted")
        if LAYER_IDS not in config and (ids := nested.get(LAYER_IDS)):
            outputs = ids[0] == 1
            config[LAYER_IDS] = [layer + outputs for layer in ids]
            notes.append(
                f"its eagle_config names the layers {ids}, taken for the "
                f"{'outputs' if outputs else 'inputs'} of layers, as SGLang takes them"
            )
        config |= {key: nested[key] for key in _VARIANTS if key in nested and key not in config}
        if config.get("draft_vocab_size") in (None, config.get("vocab_size")) and "d2t" in tensors:
            if bool(tensors["d2t"].any()):
                raise HeadsError(f"{files.label}: its d2t renames tokens of a whole vocabulary")
            tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
            notes.append("its d2t, of a whole vocabulary, is left out: vLLM has no place for it")
        spec = files.config.get("speculators_config") or {}
        medusa = config.get("medusa") or {}
        depth = (target or {}).get("num_hidden_layers")
        return cls(
            files.label,
            tensors,
            config,
            config.get("base_model_name_or_path")
            or (spec.get("verifier") or {}).get("name_or_path")
            or "",
            depth or (medusa.get("target") or {}).get("num_layers"),
            tuple(notes),
        )

    @property
    def variants(self) -> list[str]:
        """What of it the first layouts have no word for."""
        return [key for key in _VARIANTS if self.config.get(key)]


def write_native(drafter: Drafter) -> Output:
    """What `train` writes: SpecForge's names, the layers' numbers at the top."""
    config = drafter.config | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    return _output(drafter, "model.safetensors", config)


def write_safeailab(drafter: Drafter) -> Output:
    """The reference's layout: a pickle."""
    _refuse_variants(drafter, "SafeAILab's code")
    config = drafter.config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return _output(drafter, "pytorch_model.bin", config)


def write_specforge(drafter: Drafter) -> Output:
    """SpecForge's, which SGLang serves."""
    _refuse_variants(drafter, "SpecForge")
    layers, notes = drafter.config.get(LAYER_IDS), drafter.notes
    extra: dict[str, Any] = {"use_aux_hidden_state": True}
    usual = None if drafter.num_layers is None else default_layers(drafter.num_layers)
    if layers and layers != usual:
        extra[LAYER_IDS] = [layer - 1 for layer in layers]
        if layers[0] != 2:
            notes += (
                f"it reads the inputs of layers {layers}: SGLang numbers outputs, newer versions "
                "only where the first is 1; check what your version's log says",
            )
    config = drafter.config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": extra,
    }
    return _output(drafter, "model.safetensors", config, notes)


def write_speculators(drafter: Drafter) -> Output:
    """The layout of vLLM's own training library; its name of the target may need a correction."""
    outside = {"medusa", "base_model_name_or_path", "draft_vocab_size", "target_hidden_size"}
    outside |= {LAYER_IDS, *_VARIANTS}
    inner = {key: value for key, value in drafter.config.items() if key not in outside}
    inner |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    method = {"proposal_type": "greedy", "speculative_tokens": _DRAFTED}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": drafter.target, "architectures": []},
        },
        "draft_vocab_size": drafter.config.get("draft_vocab_size") or inner["vocab_size"],
        **{key: bool(drafter.config.get(key)) for key in _VARIANTS},
        "transformer_layer_config": inner,
    }
    config |= {key: drafter.config[key] for key in outside if key in drafter.config}
    config |= {key: bool(drafter.config.get(key)) for key in _VARIANTS}
    tensors = {name.replace(_OWN, _THEIRS, 1): t for name, t in drafter.tensors.items()}
    return Output("model.safetensors", tensors, config, drafter.notes)


DRAFTER_FORMATS: dict[str, Callable[[Drafter], Output]] = {
    "native": write_native,
    "safeailab": write_safeailab,
    "specforge": write_specforge,
    "speculators": write_speculators,
}


def _output(
    drafter: Drafter, file: str, config: dict[str, Any], notes: tuple[str, ...] | None = None
) -> Output:
    return Output(file, drafter.tensors, config, drafter.notes if notes is None else notes)


def _canonical(name: str) -> str:
    bare = name.rsplit("model.", 1)[-1]
    return _OWN + bare.removeprefix(_THEIRS) if bare.startswith(_THEIRS) else bare


def _refuse_variants(drafter: Drafter, name: str) -> None:
    if found := drafter.variants:
        raise HeadsError(
            f"{drafter.label} is built with {', '.join(found)}, which {name} does not know. Take "
            "native or speculators"
        )
