"""What an EAGLE drafter's checkpoint is, and whether it fits a target; vLLM loads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.heads.checkpoint import NO, Check, Verdict, compare
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint, find_target
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.model import HeadsError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleInspection:
    """All that can be said of a drafter without loading it."""

    source: str
    method: str  # vLLM's: "eagle3", or "eagle" for EAGLE-1 and 2
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: list[int] | None  # of the target, whose inputs it reads; None: not said, or EAGLE-1
    parameters: int
    checks: list[Check]

    @property
    def fits(self) -> bool:
        """Whether nothing is known to be wrong."""
        return all(check.verdict != NO for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        checks = [vars(check) for check in self.checks]
        return {**vars(self), "checks": checks, "fits": self.fits}


def inspect_eagle(
    source: str | Path, target: str | Path | None = None, *, revision: str | None = None
) -> EagleInspection:
    """Look at a drafter's config and headers, and at a target's config.

    Raises:
        HeadsError: Not an EAGLE drafter, or no such target.

    """
    files = find_checkpoint(source, revision)
    config, names = flat_config(files.config), bare_names(files)
    width: Any = config.get("hidden_size")
    vocab: Any = config.get("vocab_size")
    last_only = reads_last_only(config) and "layers.0.hidden_norm.weight" in names
    if not ("fc.weight" in names or last_only) or not {type(width), type(vocab)} == {int}:
        raise HeadsError(f"{source}: no EAGLE drafter, which has an fc.weight and a config")
    specs = files.specs(names.values())
    hidden = config.get("target_hidden_size") or width
    shape = specs[names["fc.weight"]].shape if "fc.weight" in names else (0, 0)
    is_first = shape == (width, 2 * hidden) and "lm_head.weight" not in names
    method, layers = ("eagle", None) if is_first else ("eagle3", named_layers(config))
    draft_vocab = config.get("draft_vocab_size") or vocab
    checks = [Check("trees", NO, f"it {why}") for why in not_for_trees(config, names, method)]
    if draft_vocab != vocab:
        checks.append(_draft_vocabulary(files, names, draft_vocab, vocab))
    if not is_first and (doubt := doubtful_layers(config)):
        checks.append(Check("numbers of layers", "unknown", doubt))
    if target is not None:
        sizes = config_sizes(find_target(target).config)
        checks.append(compare("hidden size", hidden, sizes["hidden_size"]))
        checks.append(compare("vocabulary", vocab, sizes["vocab_size"]))
        if not is_first and sizes["num_layers"] is not None and shape[1]:
            checks.append(_layers(layers, shape[1] // hidden, sizes["num_layers"]))
    stored = (s for name, s in specs.items() if not name.endswith(("d2t", "t2d")))
    parameters = sum(spec.num_values for spec in stored)
    return EagleInspection(
        str(source), method, hidden, vocab, draft_vocab, layers, parameters, checks
    )


def bare_names(files: CheckpointFiles) -> dict[str, str]:
    """A drafter's tensors as vLLM calls them -> as they are stored."""
    bare = ((name.rsplit("model.", 1)[-1], name) for name in files.files)
    return {name.replace("midlayer.", "layers.0.", 1): stored for name, stored in bare}


def not_for_trees(config: Mapping[str, Any], names: Collection[str], method: str) -> Iterator[str]:
    """Why a drafter is not served with trees, whatever its target, and what to do.

    Args:
        config: Flat, see `flat_config`.
        names: Of its tensors, see `bare_names`.
        method: vLLM's.

    """
    if "mask_hidden" in names or "peagle" in str(config.get("architectures")).lower():
        yield 'drafts all depths at once (P-EAGLE), which trees do not. Leave "tree" out'
    window, types = config.get("sliding_window"), config.get("layer_types")
    slides = "sliding_attention" in types if types else config.get("use_sliding_window", True)
    if window and slides:
        yield f'has a sliding window ({window}), which branches do not know. Leave "tree" out'
    if reads_last_only(config) and method == "eagle3":
        yield (
            "reads the target's last hidden state only (use_aux_hidden_state), which has not been "
            'tried with trees. Leave "tree" out'
        )
    if "fc.bias" in names:
        yield 'has biases in "fc", for which vLLM\'s EAGLE has no place. Take another drafter'
    whole = config.get("draft_vocab_size") in (None, config.get("vocab_size"))
    if whole and "d2t" in names and method == "eagle3":
        yield (
            'drafts the whole vocabulary and has a "d2t" nevertheless, for which vLLM has no place '
            "then. `vllm-medusa convert --to native` leaves it out"
        )


def reads_last_only(config: Mapping[str, Any]) -> bool:
    """Whether a drafter of EAGLE-3's shape is given the last hidden state, as EAGLE-1 is."""
    extra = config.get("eagle_config")
    return isinstance(extra, Mapping) and extra.get("use_aux_hidden_state") is False


def doubtful_layers(config: Mapping[str, Any]) -> str:
    """What is not sure of the layers that a drafter's config names; "": nothing.

    vLLM takes numbers in an ``eagle_config`` for layers whose inputs are read. SpecForge and SGLang
    number outputs there where the first is 1.
    """
    extra, layers = config.get("eagle_config"), named_layers(config)
    if config.get(LAYER_IDS) or not layers or not isinstance(extra, Mapping) or layers[0] != 1:
        return ""
    moved = [layer + 1 for layer in layers]
    return (
        f"its eagle_config names {layers}, which vLLM takes for inputs of layers; where SpecForge "
        f"made it they are outputs, that is the inputs of {moved}. `vllm-medusa convert --to "
        "native` writes it so"
    )


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config with what speculators keeps apart in one place, as vLLM reads it."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    left_out = {"transformer_layer_config", "architectures", "speculators_config"}
    left_out |= {"speculators_model_type", "speculators_version"}
    outer = {key: value for key, value in config.items() if key not in left_out}
    outer = {key: value for key, value in outer.items() if value is not None}
    return {**inner, "norm_before_residual": True, **outer}


def drafter_method(source: str | Path | None) -> str | None:
    """The method of an EAGLE drafter in a local folder; None: anything else, a hub name too."""
    if source is None or not Path(source).expanduser().is_dir():
        return None
    try:
        return inspect_eagle(source).method
    except (HeadsError, OSError):
        return None


def named_layers(config: Mapping[str, Any]) -> list[int] | None:
    """The target's layers that a drafter's config names; None: it names none. By vLLM's rule."""
    extra = config.get("eagle_config")
    ids = config.get(LAYER_IDS) or (extra.get(LAYER_IDS) if isinstance(extra, Mapping) else None)
    return list(ids) if ids else None


def default_layers(num_layers: int) -> list[int]:
    """Those that vLLM takes of a target with so many layers where none are named."""
    return [2, num_layers // 2, num_layers - 3]


def _draft_vocabulary(
    files: CheckpointFiles, names: Mapping[str, str], size: int, vocab: int
) -> Check:
    if "d2t" not in names:
        return Check("draft vocabulary", NO, f"{size} tokens, but no d2t tells which")
    ((_, offsets),) = files.tensors([names["d2t"]])
    ids = offsets.long() + offsets.new_tensor(range(len(offsets))).long()
    right = len(ids) == size == len(ids.unique()) and ids.min() >= 0 and ids.max() < vocab
    text = f"{size} of {vocab} tokens"
    return Check("draft vocabulary", *(("fits", text) if right else (NO, f"{text}; bad d2t")))


def _layers(layers: list[int] | None, wanted: int, count: int) -> Check:
    text = f"reads {wanted} hidden states; its config names {layers or 'no layers'} of {count}"
    verdict: Verdict = "fits"
    if layers is None:
        verdict, layers = "unknown", default_layers(count)
        text += f", so vLLM takes {layers}"
    right = len(set(layers)) == wanted and all(0 <= layer <= count for layer in layers)
    return Check("auxiliary layers", verdict if right else NO, text)
