"""The type of an EAGLE drafter's checkpoint, and whether it fits a target; vLLM loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.eagle_tensors import LAYER_IDS, Layout, named_layers
from vllm_medusa.heads.files import (
    CheckpointFiles,
    Progress,
    Source,
    find_checkpoint,
    find_target,
    is_drafter,
)
from vllm_medusa.heads.fingerprint import config_sizes, of_target
from vllm_medusa.heads.fit import NO, Check, Inspected, Verdict, compare
from vllm_medusa.heads.model import HeadsError

_OLD_SPECFORGE = (
    "its config has norm_output, with which SpecForge trained plain EAGLE-3 until September 2026: "
    "if it is older, remove the key from its config.json"
)


@dataclass(frozen=True)
class EagleInspection(Inspected):
    """All information on a drafter that is available without loading it."""

    drafter: Layout

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        of_layout = [
            *("method", "kind", "layout", "features", "target_hidden_size", "vocab_size"),
            *("draft_vocab_size", "layers", "parameters"),
        ]
        found = {"source": self.source} | {key: getattr(self.drafter, key) for key in of_layout}
        found["base_model"] = self.drafter.config.get("base_model_name_or_path")
        checks = [vars(check) for check in self.checks]
        return {**found, "damage": self.damage, "checks": checks, "fits": self.fits}


def inspect_eagle(
    source: str | Path,
    target: str | Path | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> EagleInspection:
    """Inspect a drafter's config and tensors, and a target's config.

    Raises HeadsError: not an EAGLE drafter, or no such target.
    """
    files = find_checkpoint(source, revision)
    sizes = {} if target is None else config_sizes(find_target(target).config)
    found = inspect_drafter(files, sizes)
    if target is not None:
        found.checks.append(of_target(files, target))
    return replace(found, damage=files.find_damage(files.files, progress))


def inspect_drafter(
    files: CheckpointFiles, target: Mapping[str, Any], method: str | None = None
) -> EagleInspection:
    """`inspect_eagle` without values, for a target of these `config_sizes`, if known.

    ``method`` is vLLM's; None: it follows from the tensors.
    """
    found = Layout.read(files, method)
    checks = [Check("trees", NO, text) for text in found.refusals()]
    if target:
        checks.append(compare("hidden size", found.target_hidden_size, target["hidden_size"]))
        checks.append(compare("vocabulary", found.vocab_size, target["vocab_size"]))
    if quantized := found.config.get("quantization_config"):
        kind = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        checks.append(Check("tensors", "unknown", f"quantized ({kind}): they were not checked"))
    else:
        checks += (Check("tensors", NO, text) for text in found.problems())
    if "d2t" in found.names and found.draft_vocab_size != found.vocab_size:
        checks.append(_draft_vocabulary(files, found))
    if found.reads_layers and (doubt := doubtful_layers(found.config)):
        checks.append(Check("numbers of layers", "unknown", doubt))
    if found.layout == "SpecForge" and found.config.get("norm_output"):
        checks.append(Check("norm_output", "unknown", _OLD_SPECFORGE))
    if found.reads_layers and target.get("num_layers") is not None:
        checks.append(_layers(found.layers, found.num_states, target["num_layers"]))
    return EagleInspection(files.label, checks, [], found)


def require_eagle(
    source: str, revision: str | None, method: str, target: str, sizes: Mapping[str, Any]
) -> EagleInspection:
    """`inspect_drafter` of a drafter for vLLM's ``method`` and a target of these `config_sizes`.

    Raises HeadsError: it does not fit.
    """
    files = find_checkpoint(source, revision)
    if not is_drafter(files):
        if Path(target).is_dir() and drafter_method(target):
            raise HeadsError(
                f"The model, {target}, is an EAGLE drafter, but {source} is not. Swap them."
            )
        raise HeadsError(
            f"{source} holds no EAGLE drafter. Pass its folder, or, for Medusa and Hydra heads, "
            'set "method": "medusa".'
        )
    found = inspect_drafter(files, sizes, method)
    for check in found.checks:
        if check.verdict == NO and check.name in ("hidden size", "vocabulary"):
            raise HeadsError(
                f"The drafter in {source} is for targets with {check.name} {check.text} "
                f"({target}). Use the target that it was trained on, or a drafter trained for "
                "this one."
            )
        if check.verdict == NO:
            if (own := drafter_method(source, revision)) not in (None, method):
                raise HeadsError(f'The drafter in {source} needs "method": "{own}".')
            raise HeadsError(f"The drafter in {source}: {check.text}.")
    return found


def doubtful_layers(config: Mapping[str, Any]) -> str:
    """Describe the ambiguity of the layers in a drafter's config; "" if there is none.

    vLLM reads numbers in an ``eagle_config`` as layers whose inputs are used. SpecForge and SGLang
    number outputs there if the first is 1.
    """
    extra, layers = config.get("eagle_config"), named_layers(config)
    if config.get(LAYER_IDS) or not layers or not isinstance(extra, Mapping) or layers[0] != 1:
        return ""
    moved = [layer + 1 for layer in layers]
    return (
        f"its eagle_config has {layers}, which vLLM reads as inputs of layers; if SpecForge "
        f"wrote it, they are outputs, i.e. the inputs of {moved}. `vllm-medusa convert --to "
        "native` corrects them"
    )


def drafter_method(source: Source, revision: str | None = None) -> str | None:
    """The method of an EAGLE drafter, downloaded first if on the hub; None for anything else."""
    try:
        return Layout.read(find_checkpoint(source, revision)).method
    except (HeadsError, OSError):
        return None


def mask_entry(source: str | Path, revision: str | None = None) -> tuple[int, torch.Tensor]:
    """The token and the state [features] of P-EAGLE's entries for deeper levels."""
    files = find_checkpoint(source, revision)
    layout = Layout.read(files)
    ((_, state),) = files.tensors([layout.names["mask_hidden"]])
    return layout.mask_token, state.flatten()


def default_layers(num_layers: int) -> list[int]:
    """The default of vLLM for a target with that many layers."""
    return [2, num_layers // 2, num_layers - 3]


def _draft_vocabulary(files: CheckpointFiles, layout: Layout) -> Check:
    size, vocab = layout.draft_vocab_size, layout.vocab_size
    text = f"{size} of {vocab} tokens"
    ((_, offsets),) = files.tensors([layout.names["d2t"]])
    ids = offsets.long() + torch.arange(len(offsets))
    known, low, high = len(ids.unique()), int(ids.min()), int(ids.max())
    if len(ids) == size == known and low >= 0 and high < vocab:
        return Check("draft vocabulary", "fits", text)
    text += f'; its "d2t" has token ids from {low} to {high}, {known} distinct ones of {len(ids)}'
    return Check("draft vocabulary", NO, f"{text}. It belongs to another target, or is damaged")


def _layers(layers: list[int] | None, wanted: int, count: int) -> Check:
    verdict: Verdict = "fits" if layers else "unknown"
    source = "its config has" if layers else "its config has none; vLLM's default is"
    layers = layers or default_layers(count)
    right = all(isinstance(layer, int) and 0 <= layer <= count for layer in layers)
    text = f"it reads {wanted} hidden states; {source} the layers {layers}"
    if right and len(set(layers)) == len(layers) == wanted:
        return Check("auxiliary layers", verdict, f"{text} of {count}")
    text += (
        f"; {wanted} distinct ones from 0 to {count} are needed. Set {LAYER_IDS!r} in its config"
    )
    return Check("auxiliary layers", NO, f"{text}.json to those that it was trained on")
