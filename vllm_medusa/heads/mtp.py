"""The multi-token-prediction (MTP) modules in a target's own checkpoint; vLLM loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_medusa.heads.files import CheckpointFiles, Progress
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.fit import NO, Check, Inspected
from vllm_medusa.heads.formats import is_head_tensor

# Targets whose modules were tested with trees, and vLLM's names of these modules
MTP_MODULES = {
    "MiMoForCausalLM": "MiMoMTPModel",
    "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
    "Ernie4_5_MoeForCausalLM": "ErnieMTPModel",
    "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTPModel",
    "HYV3ForCausalLM": "HYV3MTPModel",
    "ExaoneMoeForCausalLM": "ExaoneMoeMTP",
}
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
    kind, after = sizes["architecture"], f"layers.{sizes['num_layers']}."
    names = [name for name in files.files if "mtp" in name or after in name]
    if not names:
        text = "its config has an MTP module, but its files do not. Use a complete checkpoint"
        checks = [Check("tensors", NO, text)]
    elif kind not in MTP_MODULES:
        text = f"not with the MTP module of {kind}, only with those of {', '.join(MTP_MODULES)}"
        checks = [Check("trees", NO, f'{text}. Omit "tree" to use vLLM\'s own MTP')]
    elif number != 1:
        text = f'they need one MTP module, not {number}. Omit "tree" to use vLLM\'s own MTP'
        checks = [Check("trees", NO, text)]
    else:
        text = f'supported for {kind}: {{"method": "mtp", "tree": "dynamic"}}, without "model"'
        checks = [Check("trees", "fits", text)]
    damage = files.find_damage((n for n in names if files.files[n].exists()), progress)
    return MtpInspection(files.label, checks, damage, kind, number, len(names))


def _number(config: Mapping[str, Any]) -> int:
    """The number of MTP modules in a target's config."""
    text = config.get("text_config")
    levels = [config, text] if isinstance(text, Mapping) else [config]
    return next((level[key] for level in levels for key in _NUMBERS if level.get(key)), 0)
