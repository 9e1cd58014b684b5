"""The multi-token-prediction (MTP) modules in a target's own checkpoint; vLLM loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_medusa.heads.files import CheckpointFiles, Progress
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.fit import NO, Check, Inspected
from vllm_medusa.heads.formats import is_head_tensor, listing

_SHARED = ("embed_tokens.", "shared_head.")


class Module(NamedTuple):
    """A module that was tested with trees: its class in vLLM, its tensors in a checkpoint."""

    kind: str  # vLLM's architecture
    own: str = "enorm hnorm eh_proj shared_head.norm"  # weights outside its decoder layer
    prefix: str = "model.layers.{}."  # of all its tensors; {}: number of the target's layers
    layer: str = ""  # further prefix of its decoder layer
    optional: tuple[str, ...] = _SHARED  # beginnings of others that may exist


_EXAONE = Module(
    "ExaoneMoeMTP",
    "fc norm pre_fc_norm_embedding pre_fc_norm_hidden",
    "mtp.",
    "layers.0.",
    ("embed_tokens.",),
)
MTP_MODULES = {  # by the target's architecture
    "MiMoForCausalLM": Module(
        "MiMoMTPModel",
        "token_layernorm hidden_layernorm input_proj final_layernorm",
        "model.mtp_layers.0.",
        optional=(),
    ),
    "Glm4MoeForCausalLM": Module("Glm4MoeMTPModel"),
    "Ernie4_5_MoeForCausalLM": Module(
        "ErnieMTPModel", "emb_norm.0 hidden_norm.0 linear_proj.0", "model.mtp_", "block.0.", ()
    ),
    "DeepseekV3ForCausalLM": Module("DeepSeekMTPModel"),
    "Glm4MoeLiteForCausalLM": Module("Glm4MoeLiteMTPModel"),
    "HYV3ForCausalLM": Module("HYV3MTPModel", "enorm hnorm eh_proj final_layernorm"),
    "ExaoneMoeForCausalLM": _EXAONE,
    "ExaoneMoEForCausalLM": _EXAONE,  # vLLM knows both
}
_DENSE = "mlp.down_proj.weight"
_NUMBERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class MtpInspection(Inspected):
    """The MTP modules of a target."""

    architecture: str | None  # of the target
    modules: int
    tensors: int  # of the modules

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        return {**vars(self), "checks": [vars(c) for c in self.checks], "fits": self.fits}


def inspect_mtp(files: CheckpointFiles, progress: Progress | None = None) -> MtpInspection | None:
    """Inspect the config and tensors of a target's MTP modules; None: it has none, or heads."""
    number, sizes = _number(files.config), config_sizes(files.config)
    if not number or any(map(is_head_tensor, files.files)):
        return None
    kind, layers = sizes["architecture"], sizes["num_layers"]
    names = [name for name in files.files if "mtp" in name or f"layers.{layers}." in name]
    module = MTP_MODULES.get(kind or "")
    if module is None:
        text = f"not with the MTP module of {kind}, only with those of {', '.join(MTP_MODULES)}"
        checks = [Check("trees", NO, f'{text}. Omit "tree" to use vLLM\'s own MTP')]
    elif number != 1:
        text = f'they need one MTP module, not {number}. Omit "tree" to use vLLM\'s own MTP'
        checks = [Check("trees", NO, text)]
    else:
        checks = [check_tensors(files, module, layers)]
        if checks[0].verdict != NO:
            text = f'supported for {kind}: {{"method": "mtp", "tree": "dynamic"}}, without "model"'
            checks.append(Check("trees", "fits", text))
    damage = files.find_damage((n for n in names if files.files[n].exists()), progress)
    return MtpInspection(files.label, checks, damage, kind, number, len(names))


def check_tensors(files: CheckpointFiles, module: Module, num_layers: int) -> Check:
    """Compare the names of the tensors of a target's MTP module with those that vLLM reads.

    The module's decoder layer has the tensors of the target's last layer, or of its first one. Only
    names are read. "unknown": the layers are quantized or differ from the module's, or not all
    files were read.
    """
    prefix = module.prefix.format(num_layers)
    found = _after(prefix, files.files)
    if not found:
        if _further_files(files):
            return Check("tensors", "unknown", "not all of the folder's files were read")
        text = "its config has an MTP module, but its files do not. Use a complete checkpoint"
        return Check("tensors", NO, text)
    layers = [
        {module.layer + name for name in _after(f"model.layers.{index}.", files.files)}
        for index in (num_layers - 1, 0)
    ]
    layer = max(layers, key=lambda names: len(names & found))
    if not all(name.endswith(("weight", "bias")) for name in found.union(*layers)):
        return Check("tensors", "unknown", "not compared: quantized, or experts in one tensor")
    if not layer or module.layer + _DENSE in found - layer:
        return Check("tensors", "unknown", "the target has no layer like the module's to compare")
    wanted = layer | {f"{name}.weight" for name in module.own.split()}
    unread = {name for name in found - wanted if not name.startswith(module.optional)}
    lacks = "vLLM would not start, or draft with uninitialized weights. Use a complete checkpoint"
    reads = "vLLM does not read this. Use the checkpoint as it was published"
    for what, names, effect in (("lacks", wanted - found, lacks), ("has", unread, reads)):
        if names:
            listed = listing(sorted(prefix + name for name in names))
            return Check("tensors", NO, f"the MTP module {what} {listed}; {effect}")
    return Check("tensors", "fits", f"the MTP module has all {len(wanted)}")


def _further_files(files: CheckpointFiles) -> bool:
    """Whether the folder has weights that neither an index nor the usual file names list."""
    read = {*files.files.values()}
    return any(
        {*folder.glob("*.safetensors")} - read and not [*folder.glob("*.index.json")]
        for folder in {path.parent for path in read}
    )


def _after(prefix: str, names: Iterable[str]) -> set[str]:
    """The rest of the names that start with a prefix, without what vLLM computes."""
    found = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {name for name in found if "rotary_emb." not in name}


def _number(config: Mapping[str, Any]) -> int:
    """The number of MTP modules in a target's config."""
    text = config.get("text_config")
    levels = [config, text] if isinstance(text, Mapping) else [config]
    return next((level[key] for level in levels for key in _NUMBERS if level.get(key)), 0)
