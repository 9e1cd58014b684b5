"""Folders of heads and drafters: their contents, reading and writing.

Strict: nothing is dropped, guessed or left random. Stock vLLM 0.32 can read what is saved here: a
``model.safetensors`` (names as in the ``vllm`` row of `formats`) and a ``config.json``, where
fields that vLLM lacks are in ``"medusa"``: the tree, the provenance. Two limits are vLLM's: heads
that use the target's LM head need a copy of it (``convert --to vllm``), and a token map with one
LM head per head fails an assertion there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_medusa.files import new_file, new_path
from vllm_medusa.heads.files import (
    HEADS_FILES,
    CheckpointFiles,
    Source,
    TensorSpec,
    find_checkpoint,
    is_drafter,
    is_finite,
    read_json,
)
from vllm_medusa.heads.fit import require_fit
from vllm_medusa.heads.formats import TOKEN_MAP, Slot, listing, name_of, read_names
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import HeadsError, MedusaHeads

if TYPE_CHECKING:
    from vllm_medusa.heads.eagle_model import EagleDrafter

FORMAT_VERSION = 1  # of config.json's "medusa" object
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class HeadsInfo:
    """The contents of a checkpoint, from names, headers and ``config.json``; weights are not read.

    Sizes come from the tensors, not from ``config.json``.
    """

    files: CheckpointFiles
    format: str  # "v1", "v2", "vllm", "full" or "hydra", see `formats`
    names: dict[Slot, str]  # in the files
    specs: dict[Slot, TensorSpec]
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None  # the target's; None: not in the checkpoint
    draft_vocab_size: int | None  # tokens that the heads score; None: all of the target's
    bias: bool  # of the residual layers
    num_lm_heads: int  # num_heads, 1, or 0 for the target's
    lm_head_bias: bool
    lm_head_rows: int | None  # as stored, padding included; None: nothing stored
    token_map: bool
    dtype: torch.dtype  # can represent every tensor without loss

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return self.files.config

    @property
    def medusa(self) -> dict[str, Any]:
        """The config's "medusa" object."""
        return self.config.get("medusa") or {}

    @property
    def tree(self) -> Any | None:
        """The raw value of ``medusa.tree`` in the config."""
        return self.medusa.get("tree")

    @property
    def base_model(self) -> str | None:
        """The target's name, if it is in the config."""
        base = self.config.get("base_model_name_or_path")
        return base if isinstance(base, str) and base not in ("", "N/A") else None

    @property
    def taus(self) -> tuple[float, ...]:
        """Tokens per step with 1, 2, .. nodes of the heads' own tree; empty: unknown."""
        found = self.medusa.get("tree_tokens_per_step")
        numbers = isinstance(found, list) and all(isinstance(tau, int | float) for tau in found)
        return tuple(map(float, found)) if numbers and found else ()

    @property
    def sharpness(self) -> tuple[float, ...] | None:
        """[num_heads] factors on logits that calibrate the heads' confidence; None: unknown.

        `calibrate` writes them to the heads' config.json.
        """
        try:
            fits = self.medusa["calibration"]["fit"]
            found = tuple(1 / fit["temperature"] if fit else 1.0 for fit in fits)
        except (TypeError, KeyError, ZeroDivisionError):
            return None
        return found if len(found) == self.num_heads and all(0 < x < 100 for x in found) else None

    @property
    def is_hydra(self) -> bool:
        """Whether these are Hydra heads, which depend on the preceding tokens."""
        return self.format == "hydra"

    @property
    def includes_base(self) -> bool:
        """Whether the checkpoint includes the target, which was trained with the heads."""
        return self.format == "full"

    def read_token_map(self) -> Tensor | None:
        """The target's id of each draft token, int64 [V_draft]; None: no map."""
        if not self.token_map:
            return None
        ((_, stored),) = self.files.tensors([self.names[TOKEN_MAP]])
        return stored.to(torch.int64)


def peek_heads(source: Source, *, revision: str | None = None) -> HeadsInfo:
    """Describe a checkpoint without loading its weights.

    Raises HeadsError: not heads, or a tensor is missing, unexpected, or of the wrong shape or
    dtype.
    """
    files = find_checkpoint(source, revision)
    label, config = files.label, files.config
    _refuse_other_drafters(files)
    spelling, prefix, names, left_over = read_names(files.files)
    heads = {slot.head for slot in names if slot.head is not None and slot != TOKEN_MAP}
    if not heads:
        raise HeadsError(
            f"{label} holds no Medusa head: none of its {len(files.files)} tensors has the name of "
            f"one ({listing(sorted(files.files))}). Is this a target without MTP? Pass the "
            "folder or file of heads or of a drafter"
        )
    if spelling == "hydra" and Slot("skip") not in names:
        raise HeadsError(
            f"{label} has no 'hydra_mlp.0.0.res_connection.weight': these heads do not read tokens "
            "(the reference calls them not grounded). Use grounded Hydra heads"
        )
    lm_heads = [slot for slot in names if slot.part == "lm_head"]
    if config.get("original_lm_head") and {s.head for s in lm_heads} == {0} != heads:
        # vLLM stores the shared LM head as head 0's, with this flag
        names |= {slot._replace(head=None): names.pop(slot) for slot in lm_heads}
    num_heads = 1 + max(heads)
    if num_heads == 1:
        names |= {s._replace(head=0): names.pop(s) for s in [*names] if s.head is None}
    num_layers = 1 + max((slot.layer for slot in names if slot.part == "layer"), default=-1)
    stored = files.specs(names.values())
    specs = {slot: stored[name] for slot, name in names.items()}
    wanted = _empty_heads(specs, spelling == "hydra", num_heads, num_layers)
    shapes = {slot: tuple(t.shape) for slot, t in _tensors(wanted).items()}
    if TOKEN_MAP in specs:
        shapes[TOKEN_MAP] = specs[TOKEN_MAP].shape[:1]
    missing = [prefix + name_of(s, spelling, num_layers) for s in shapes if s not in names]
    left_over += [name for slot, name in names.items() if slot not in shapes]
    if spelling == "hydra":
        left_over += files.files.keys() - names.values() - {*left_over}
    problems = [("lacks", missing), ("has unexpected", left_over)]
    if missing or left_over:
        listed = " and ".join(f"{what} {listing(which)}" for what, which in problems if which)
        raise HeadsError(
            f"{label} {listed} (its names imply {num_heads} heads, {num_layers} layers). The file "
            "is damaged, or in a format that this version does not support"
        )
    for slot, spec in specs.items():
        _check_spec(f"{label}: {names[slot]!r}", slot, spec, shapes[slot])
    if not isinstance(config.get("medusa") or {}, dict):
        raise HeadsError(
            f'{label}: "medusa" in its config.json is {config["medusa"]!r}; it must be an object '
            'such as {"tree": [[0], [0, 0]]}'
        )
    found = {(slot.part, slot.kind) for slot in names}
    lm_heads = [slot for slot in names if (slot.part, slot.kind) == ("lm_head", "weight")]
    rows = specs[lm_heads[0]].shape[0] if lm_heads else None
    stated = config.get("vocab_size")
    vocab = stated if isinstance(stated, int) and stated > 0 else None
    if rows is not None and TOKEN_MAP not in names:
        vocab = rows if vocab is None else min(vocab, rows)
    format_ = "v2" if spelling == "v1" and not lm_heads else spelling
    dtypes = [spec.dtype for spec in specs.values() if isinstance(spec.dtype, torch.dtype)]
    return HeadsInfo(
        files=files,
        format="full" if len(files.files) > len(names) else format_,
        names=names,
        specs=specs,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=shapes[Slot("layer")][0] if num_layers else shapes[lm_heads[0]][1],
        vocab_size=vocab,
        draft_vocab_size=specs[TOKEN_MAP].shape[0] if TOKEN_MAP in names else vocab,
        bias=("layer", "bias") in found,
        num_lm_heads=len(lm_heads),
        lm_head_bias=("lm_head", "bias") in found,
        lm_head_rows=rows,
        token_map=TOKEN_MAP in names,
        dtype=reduce(torch.promote_types, dtypes),  # the token map's integer type has no effect
    )


def _check_spec(name: str, slot: Slot, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if spec.shape != shape:
        raise HeadsError(
            f"{name} has shape {list(spec.shape)}; to match the others it must be {list(shape)}"
        )
    allowed = INTEGERS if slot == TOKEN_MAP else FLOATS
    if spec.dtype not in allowed:
        raise HeadsError(
            f"{name} is {_word(spec.dtype)}; it must be one of {', '.join(map(_word, allowed))}. "
            "Quantized heads are not supported: use the originals"
        )


def _refuse_other_drafters(files: CheckpointFiles) -> None:
    if is_drafter(files):
        raise HeadsError(
            f"{files.label} holds an EAGLE drafter, not heads. Engines take it as "
            '{"method": "eagle3", "model": ..., "tree": "dynamic"} ("eagle" for EAGLE-1 and 2) and '
            "inspect describes it; calibrate and tree do not apply, since its trees follow its "
            "probabilities at every step"
        )
    if prefix := [name for name in files.files if "prefix_embed" in name]:
        raise HeadsError(
            f"{files.label} has {prefix[0]!r}: Hydra++'s prefix attention, which is not supported. "
            "Use heads of the MLP variant, or train heads: vllm-medusa train"
        )


def _empty_heads(
    specs: Mapping[Slot, TensorSpec], is_hydra: bool, num_heads: int, num_layers: int
) -> MedusaHeads:
    """Heads on the meta device; sizes are those of the first tensor of each kind."""
    found = {(slot.part, slot.kind) for slot in specs}
    single = any(slot.head is None for slot in specs)
    lm_head = Slot("lm_head", None if single else 0)

    def size(slot: Slot, dim: int = 0) -> int:
        shape = specs[slot].shape if slot in specs else ()
        return (shape[dim] if shape else 0) or 1

    lm_heads = 1 if single else num_heads
    return new_heads(
        is_hydra,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=size(Slot("layer")) if num_layers else size(lm_head, -1),
        vocab_size=size(lm_head),
        bias=("layer", "bias") in found,
        num_lm_heads=lm_heads if any(part == "lm_head" for part, _ in found) else 0,
        lm_head_bias=("lm_head", "bias") in found,
        device="meta",
    )


def new_heads(is_hydra: bool, *, bias: bool = True, **sizes: Any) -> MedusaHeads:
    """Medusa or Hydra heads of these ``sizes``; the layers of Hydra heads always have biases."""
    return HydraHeads(**sizes) if is_hydra else MedusaHeads(bias=bias, **sizes)


def load_heads(
    source: Source,
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    max_heads: int | None = None,
) -> tuple[MedusaHeads, HeadsInfo]:
    """Load Medusa or Hydra heads for a target of ``hidden_size`` and ``vocab_size``.

    ``dtype`` None keeps the checkpoint's; ``max_heads`` loads only the first ones.

    Stored LM heads must have ``vocab_size`` rows, or one per entry of the token map. Additional
    rows are padding, and removed, only if ``config.json`` has exactly this ``vocab_size``.

    Raises HeadsError: as `peek_heads`; heads for another target; values that are non-finite, or too
    large for ``dtype``.
    """
    info = peek_heads(source, revision=revision)
    require_fit(info, hidden_size, vocab_size)
    dtype = info.dtype if dtype is None else dtype
    count = info.num_heads if max_heads is None else min(info.num_heads, max_heads)
    token_map = info.read_token_map()
    heads = new_heads(
        info.is_hydra,
        num_heads=count,
        num_layers=info.num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        bias=info.bias,
        num_lm_heads=min(info.num_lm_heads, count),
        lm_head_bias=info.lm_head_bias,
        token_map=token_map,
        device=device,
        dtype=dtype,
    )
    heads.requires_grad_(False)
    slots = {
        info.names.get(slot) or info.names[slot._replace(head=None)]: tensor
        for slot, tensor in _tensors(heads).items()
        if slot != TOKEN_MAP
    }
    for name, tensor in info.files.finite_tensors(slots):
        slot = slots[name]
        if tensor.shape[0] != slot.shape[0]:  # an LM head with more rows than are scored
            tensor = tensor[:vocab_size] if token_map is None else tensor[token_map]
        converted = tensor.to(dtype)
        slot.copy_(converted)
        if not is_finite(converted):
            raise HeadsError(
                f"{info.files.label}: {name!r} holds values up to "
                f"{float(tensor.abs().max()):.3g}, too large for {dtype}. Load the heads as "
                "bfloat16 or float32"
            )
    return heads, info


def save_heads(
    folder: str | Path, heads: MedusaHeads, config: Mapping[str, Any] | None = None
) -> Path:
    """Write heads as ``model.safetensors`` and, last, ``config.json``; returns the folder.

    ``config`` is JSON: ``base_model_name_or_path`` is written at the top level, the rest (``tree``,
    provenance) under ``"medusa"``.

    Raises HeadsError: a value is non-finite, or the folder has a file that readers prefer; nothing
    is written.
    """
    for name in HEADS_FILES:
        if (Path(folder) / name).exists():
            raise HeadsError(
                f"{folder} already has {name}, which readers prefer: use another folder"
            )
    spelling = "hydra" if isinstance(heads, HydraHeads) else "vllm"
    tensors = {name_of(slot, spelling, heads.num_layers): t for slot, t in _tensors(heads).items()}
    sizes = {
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.draft_vocab_size,
    }
    if isinstance(heads, HydraHeads):
        document = {  # the reference's keys where they exist
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "hydra_num_heads": heads.num_heads,
            "hydra_num_layers": heads.num_layers,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
        }
    else:
        document = vllm_config(
            heads.num_heads,
            heads.num_layers,
            bias=any(block.bias is not None for block in heads.blocks),
            single_lm_head=heads.num_lm_heads != heads.num_heads,
        )
    return _save(folder, tensors, document | sizes, config)


def vllm_config(
    num_heads: int, num_layers: int, *, bias: bool, single_lm_head: bool
) -> dict[str, Any]:
    """The config, except sizes, from which stock vLLM 0.32 builds its Medusa model."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": bias,
        "original_lm_head": single_lm_head,
    }


def save_drafter(
    folder: str | Path, drafter: EagleDrafter, config: Mapping[str, Any] | None = None
) -> Path:
    """Write an EAGLE-3 drafter as `save_heads` writes heads; vLLM's own loader reads it too."""
    document = drafter.shape.config(drafter.draft_vocab_size)
    document["dtype"] = _word(drafter.fc.weight.dtype)
    return _save(folder, drafter.tensors(), document, config)


def _save(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    document: dict[str, Any],
    config: Mapping[str, Any] | None,
) -> Path:
    folder = Path(folder)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise HeadsError(f"{name!r} holds NaN or infinity: these weights are unusable")
    extra = dict(config or {})
    if base := extra.pop("base_model_name_or_path", None):
        document["base_model_name_or_path"] = base
    document["medusa"] = {"format_version": FORMAT_VERSION, **extra}
    text = config_text(document, folder / "config.json")  # before any file is written
    folder.mkdir(parents=True, exist_ok=True)
    with new_path(folder / "model.safetensors") as path:
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, {"format": "pt"})
    with new_file(folder / "config.json") as file:
        file.write(text)
    return folder


def update_config(folder: str | Path, /, **medusa_keys: Any) -> None:
    """Set keys of the ``"medusa"`` object in ``config.json``; None removes a key.

    The rest of the file is unchanged. Readers see the old file or the new one. Without a
    ``config.json``, one is created. ``provenance=entry`` appends a dict to the entries; a list
    replaces it.

    Raises HeadsError: not a folder, a config that is not a JSON object, or values that are not
    JSON.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadsError(f"{folder} is not a folder: pass the folder of a checkpoint's config.json")
    path = folder / "config.json"
    document = read_json(path) if path.is_file() else {}
    medusa = document.get("medusa") or {"format_version": FORMAT_VERSION}
    if not isinstance(medusa, dict):
        raise HeadsError(f'{path}: "medusa" is {medusa!r}; it must be an object. Correct it')
    for key, value in medusa_keys.items():
        if key == "provenance" and isinstance(value, Mapping):
            value = [*provenance_of(medusa), value]
        medusa[key] = value
    kept = {key: value for key, value in medusa.items() if medusa_keys.get(key, 0) is not None}
    text = config_text({**document, "medusa": kept}, path)
    with new_file(path) as file:
        file.write(text)


def provenance_of(medusa: Mapping[str, Any]) -> list[Any]:
    """The entries in a "medusa" object's provenance."""
    entries = medusa.get("provenance")
    return entries if isinstance(entries, list) else []


def config_text(document: Mapping[str, Any], label: object) -> str:
    """The JSON of a config; `HeadsError` for values that JSON can't express, NaN included."""
    try:
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise HeadsError(f"{label}: its values must be plain JSON ({error})") from error


def _tensors(heads: MedusaHeads) -> dict[Slot, Tensor]:
    """Views of the heads' tensors, head by head."""
    found: dict[Slot, Tensor] = {}
    kinds = ("weight", "bias")
    if isinstance(heads, HydraHeads):
        for (head, first), kind in itertools.product(enumerate(heads.inputs), kinds):
            found[Slot("layer", head, 0, kind)] = getattr(first, kind).detach()
            found[Slot("skip", head, 0, kind)] = getattr(first, f"skip_{kind}").detach()
    later = enumerate(heads.blocks, heads.num_layers - len(heads.blocks))
    for (layer, block), kind in itertools.product(later, kinds):
        if (stacked := getattr(block, kind)) is not None:
            for head, tensor in enumerate(stacked.detach()):
                found[Slot("layer", head, layer, kind)] = tensor
    single = heads.num_lm_heads == 1 < heads.num_heads
    for kind, stacked in zip(kinds, (heads.lm_head_weight, heads.lm_head_bias), strict=True):
        if stacked is not None:
            for head, tensor in enumerate(stacked.detach()):
                found[Slot("lm_head", None if single else head, 0, kind)] = tensor
    if heads.token_map is not None:
        found[TOKEN_MAP] = heads.token_map
    return found


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
