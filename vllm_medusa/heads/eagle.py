"""The type of an EAGLE drafter's checkpoint, and whether it fits a target; vLLM loads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.checkpoint import NO, Check, Verdict, compare
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint, find_target
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.model import HeadsError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleInspection:
    """All information on a drafter that is available without loading it."""

    source: str
    method: str  # vLLM's: "eagle3", or "eagle" for EAGLE-1 and 2
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: list[int] | None  # target layers whose inputs it reads; None: not stated, or EAGLE-1
    parameters: int
    checks: list[Check]

    @property
    def fits(self) -> bool:
        """Whether no problem is known."""
        return all(check.verdict != NO for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        checks = [vars(check) for check in self.checks]
        return {**vars(self), "checks": checks, "fits": self.fits}


def inspect_eagle(
    source: str | Path, target: str | Path | None = None, *, revision: str | None = None
) -> EagleInspection:
    """Inspect a drafter's config and headers, and a target's config.

    Raises:
        HeadsError: Not an EAGLE drafter, or no such target.

    """
    files = find_checkpoint(source, revision)
    return inspect_drafter(
        files, {} if target is None else config_sizes(find_target(target).config)
    )


def inspect_drafter(
    files: CheckpointFiles, target: Mapping[str, Any], method: str | None = None
) -> EagleInspection:
    """Inspect a drafter, and check it against a target of these `config_sizes`, if known.

    ``method`` is vLLM's; None: it follows from the tensors.
    """
    config, names = flat_config(files.config), bare_names(files)
    width: Any = config.get("hidden_size")
    vocab: Any = config.get("vocab_size")
    last_only = reads_last_only(config) and "layers.0.hidden_norm.weight" in names
    if not ("fc.weight" in names or last_only) or not {type(width), type(vocab)} == {int}:
        raise HeadsError(
            f"{files.label} is not an EAGLE drafter, which has an fc.weight and a config"
        )
    specs = files.specs(names.values())
    shapes = {name: specs[stored].shape for name, stored in names.items()}
    hidden = config.get("target_hidden_size") or width
    if method is None:
        is_first = shapes.get("fc.weight") == (width, 2 * hidden) and "lm_head.weight" not in names
        method = "eagle" if is_first else "eagle3"
    is_first = method == "eagle"
    layers = None if is_first else named_layers(config)
    num_states = 2 if is_first else _num_states(config)
    draft_vocab = config.get("draft_vocab_size") or vocab
    checks = [Check("trees", NO, f"it {why}") for why in not_for_trees(config, names, method)]
    if target:
        checks.append(compare("hidden size", hidden, target["hidden_size"]))
        checks.append(compare("vocabulary", vocab, target["vocab_size"]))
    for name, shape in (
        ("fc.weight", (width, num_states * hidden)),
        ("d2t", (draft_vocab,)),
        ("lm_head.weight", (draft_vocab, width)),
    ):
        if shapes.get(name, shape) != shape:
            checks.append(
                Check(
                    "shapes",
                    NO,
                    f"{name} in {files.label} has the shape {list(shapes[name])}; its config "
                    f"implies {list(shape)}. It belongs to another target, or to another method",
                )
            )
    if draft_vocab != vocab:
        checks.append(_draft_vocabulary(files, names, draft_vocab, vocab))
    if not is_first and (doubt := doubtful_layers(config)):
        checks.append(Check("numbers of layers", "unknown", doubt))
    if not is_first and not last_only and target.get("num_layers") is not None:
        checks.append(_layers(layers, num_states, target["num_layers"]))
    stored = (s for name, s in specs.items() if not name.endswith(("d2t", "t2d")))
    parameters = sum(spec.num_values for spec in stored)
    return EagleInspection(
        files.label, method, hidden, vocab, draft_vocab, layers, parameters, checks
    )


def bare_names(files: CheckpointFiles) -> dict[str, str]:
    """A drafter's tensors: vLLM's names -> stored names."""
    bare = ((name.rsplit("model.", 1)[-1], name) for name in files.files)
    return {name.replace("midlayer.", "layers.0.", 1): stored for name, stored in bare}


def not_for_trees(config: Mapping[str, Any], names: Collection[str], method: str) -> Iterator[str]:
    """Reasons why a drafter can't be served with trees on any target, with remedies.

    Args:
        config: Flat, see `flat_config`.
        names: Names of its tensors, see `bare_names`.
        method: vLLM's.

    """
    if "mask_hidden" in names or "peagle" in str(config.get("architectures")).lower():
        yield 'uses parallel drafting (P-EAGLE), which trees do not support. Omit "tree"'
    window, types = config.get("sliding_window"), config.get("layer_types")
    slides = "sliding_attention" in types if types else config.get("use_sliding_window", True)
    if window and slides:
        yield f'has a sliding window ({window}), which trees do not support. Omit "tree"'
    if reads_last_only(config) and method == "eagle3":
        yield (
            "reads only the target's last hidden state (use_aux_hidden_state), which was not "
            'tested with trees. Omit "tree"'
        )
    if "fc.bias" in names:
        yield 'has biases in "fc", which vLLM\'s EAGLE does not support. Use another drafter'
    whole = config.get("draft_vocab_size") in (None, config.get("vocab_size"))
    if whole and "d2t" in names and method == "eagle3":
        yield (
            'drafts the full vocabulary but has a "d2t", which vLLM does not support '
            "then. `vllm-medusa convert --to native` removes it"
        )


def reads_last_only(config: Mapping[str, Any]) -> bool:
    """Whether a drafter shaped like EAGLE-3 reads only the last hidden state, as EAGLE-1 does."""
    extra = config.get("eagle_config")
    return isinstance(extra, Mapping) and extra.get("use_aux_hidden_state") is False


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


def drafter_method(source: str | Path | None) -> str | None:
    """The method of an EAGLE drafter in a local folder; None for anything else, also hub names."""
    if source is None or not Path(source).expanduser().is_dir():
        return None
    try:
        return inspect_eagle(source).method
    except (HeadsError, OSError):
        return None


def named_layers(config: Mapping[str, Any]) -> list[int] | None:
    """The target's layers in a drafter's config; None if absent. By vLLM's rule."""
    extra = config.get("eagle_config")
    ids = config.get(LAYER_IDS) or (extra.get(LAYER_IDS) if isinstance(extra, Mapping) else None)
    return list(ids) if ids else None


def _num_states(config: Mapping[str, Any]) -> int:
    """The number of the target's hidden states that an EAGLE-3 drafter reads."""
    ids = (config.get("eagle_config") or {}).get(LAYER_IDS)
    return config.get("num_aux_hidden_states") or len(ids or "123")


def default_layers(num_layers: int) -> list[int]:
    """The default of vLLM for a target with that many layers."""
    return [2, num_layers // 2, num_layers - 3]


def _draft_vocabulary(
    files: CheckpointFiles, names: Mapping[str, str], size: int, vocab: int
) -> Check:
    text = f"{size} of {vocab} tokens"
    if "d2t" not in names:
        return Check("draft vocabulary", NO, f'{text}, but no "d2t". The checkpoint is incomplete')
    ((_, offsets),) = files.tensors([names["d2t"]])
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
