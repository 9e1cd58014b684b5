"""What a checkpoint is, whether anything about it is odd, and whether it fits a target."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import NO, Check, HeadsInfo, Verdict, fits, peek_heads
from vllm_medusa.heads.files import find_target
from vllm_medusa.heads.fingerprint import config_sizes, match_target
from vllm_medusa.heads.formats import TOKEN_MAP, Slot
from vllm_medusa.tree import TokenTree, TreeError
from vllm_medusa.tree.forms import read_tree

Progress = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True)
class Inspection:
    """All that can be said of a checkpoint of heads."""

    source: str
    info: HeadsInfo
    tree: TokenTree | None
    damage: list[str]  # such heads can't be loaded
    suspicions: list[str]  # they load, and something is odd
    checks: list[Check]

    @property
    def files(self) -> dict[str, int]:
        """Names of the files -> bytes."""
        paths = {self.info.files.files[name] for name in self.info.names.values()}
        return {path.name: path.stat().st_size for path in sorted(paths)}

    @property
    def bytes(self) -> int:
        """Size of the heads' tensors."""
        return sum(spec.bytes for spec in self.info.specs.values())

    @property
    def parameters(self) -> int:
        """Values of the heads' weights."""
        return sum(s.num_values for slot, s in self.info.specs.items() if slot != TOKEN_MAP)

    @property
    def dtypes(self) -> dict[str, int]:
        """Numbers of tensors of each dtype."""
        specs = self.info.specs.values()
        return dict(Counter(str(spec.dtype).removeprefix("torch.") for spec in specs))

    @property
    def fits(self) -> bool:
        """Whether nothing is known to be wrong."""
        return not self.damage and all(check.verdict != NO for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        of_info = ("format", "num_heads", "num_layers", "hidden_size", "vocab_size")
        of_info += ("draft_vocab_size", "token_map", "bias", "num_lm_heads", "lm_head_bias")
        of_info += ("lm_head_rows", "base_model", "includes_base")
        own = ("source", "files", "dtypes", "bytes", "parameters", "damage", "suspicions", "fits")
        return {
            **{key: getattr(self.info, key) for key in of_info},
            **{key: getattr(self, key) for key in own},
            "tree": None if self.tree is None else self.tree.to_lists(),
            "medusa": {key: value for key, value in self.info.medusa.items() if key != "tree"},
            "checks": [vars(check) for check in self.checks],
        }


def inspect_heads(
    source: str | Path,
    target: str | Path | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Look at every tensor of a checkpoint, and at a target's config and samples of its weights.

    Raises:
        HeadsError: No heads there, heads with tensors missing or of wrong shapes; no such target.

    """
    info = peek_heads(source, revision=revision)
    tree, checks = _own_tree(info)
    if target is not None:
        sizes = config_sizes(find_target(target).config)
        checks += fits(info, sizes["hidden_size"], sizes["vocab_size"])
        match = match_target(info, target, heads=source)
        verdicts: dict[str, Verdict] = {"same": "fits", "different": NO, "unknown": "unknown"}
        checks.append(Check("fingerprint", verdicts[match.verdict], match.reason))
    damage, suspicions = _scan(info, progress)
    return Inspection(
        str(source), info, tree, damage, [*_contradictions(info), *suspicions], checks
    )


def _own_tree(info: HeadsInfo) -> tuple[TokenTree | None, list[Check]]:
    if info.tree is None:
        return None, []
    try:
        tree = read_tree(info.tree)
    except TreeError as error:
        return None, [Check("tree", NO, f"the tree in its config is not valid: {error}")]
    ranks = max(tree.ranks) + 1
    if tree.max_depth > info.num_heads:
        text = f"its tree has depth {tree.max_depth}, but there are {info.num_heads} heads"
    elif info.draft_vocab_size is not None and ranks > info.draft_vocab_size:
        text = f"its tree takes rank {ranks - 1} of {info.draft_vocab_size} tokens"
    else:
        text = f"depth {tree.max_depth} of {info.num_heads} heads, ranks up to {ranks - 1}"
        return tree, [Check("tree", "fits", text)]
    return tree, [Check("tree", NO, text)]


def _contradictions(info: HeadsInfo) -> Iterator[str]:
    """Numbers in config.json that the tensors prove wrong; the tensors are believed."""
    stated: dict[str, Any] = {
        "medusa_num_heads": info.num_heads,
        "num_medusa_heads": info.num_heads,
        "medusa_num_layers": info.num_layers,
    }
    if not info.includes_base:  # else config.json is the model's
        stated |= {"num_heads": info.num_heads, "num_hidden_layers": info.num_layers}
        stated["hidden_size"] = info.hidden_size
        if info.draft_vocab_size is not None:
            stated["truncated_vocab_size"] = info.draft_vocab_size
        if info.format == "vllm":
            single = info.num_lm_heads != info.num_heads or info.lm_heads[0].head is None
            stated |= {"medusa_fc_bias": info.bias, "original_lm_head": single}
    for key, found in stated.items():
        if key in info.config and info.config[key] != found:
            yield f"config.json says {key} {info.config[key]!r}; the tensors say {found!r}"
    if info.format == "vllm" and info.bias and "medusa_fc_bias" not in info.config:
        yield "config.json lacks medusa_fc_bias: stock vLLM would drop the layers' biases"


def _scan(info: HeadsInfo, progress: Progress | None) -> tuple[list[str], list[str]]:
    """Read every tensor once; returns damage and suspicions.

    Damage is NaN or infinity, and a token map that names a token twice. Suspicious are LM heads of
    zeros, heads whose residual layers are all zero (never trained), and equal weights where each
    should have its own: the layers of a head (the reference's ``[ResBlock] * n``), or the heads.
    """
    damage: list[str] = []
    slots = {name: slot for slot, name in info.names.items()}
    total, done = sum(spec.bytes for spec in info.specs.values()), 0
    seen: dict[Slot, tuple[str, bool]] = {}  # digest, any value but 0
    for name, tensor in info.files.tensors(slots):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            damage.append(f"{name!r} holds NaN or infinity: the training diverged")
        if slots[name] == TOKEN_MAP and tensor.unique().numel() != tensor.numel():
            damage.append(f"{name!r} names some token twice")
        seen[slots[name]] = _digest(tensor), bool(tensor.any())
        done += info.specs[slots[name]].bytes
        if progress is not None:
            progress(done, total)
    return damage, [*_odd_lm_heads(info, seen), *_odd_layers(info, seen)]


def _digest(tensor: Tensor) -> str:
    raw: Any = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(raw).hexdigest()


def _odd_lm_heads(info: HeadsInfo, seen: dict[Slot, tuple[str, bool]]) -> Iterator[str]:
    zero = [info.names[slot] for slot in info.lm_heads if not seen[slot][1]]
    if zero:
        yield f"LM heads of zeros only, which guess nothing: {', '.join(zero)}"
    elif info.num_lm_heads > 1 and len({seen[slot] for slot in info.lm_heads}) == 1:
        yield (
            f"all {info.num_lm_heads} LM heads are equal: one would do, or the target's (convert "
            "--to v2 --target TARGET)"
        )


def _odd_layers(info: HeadsInfo, seen: dict[Slot, tuple[str, bool]]) -> Iterator[str]:
    untrained: list[int] = []
    repeated: list[int] = []
    alike: dict[Any, list[int]] = defaultdict(list)
    for head in range(info.num_heads):
        own = [slot for slot in seen if slot.head == head and slot.part == "layer"]
        layers = [
            tuple(seen[slot] for slot in sorted(own) if slot.layer == layer)
            for layer in range(info.num_layers)
        ]
        lm_head = Slot("lm_head", head)
        trained = any(seen[slot][1] for slot in own)
        if layers and not trained:
            untrained.append(head)
        if len(layers) > 1 and trained and len(set(layers)) == 1:
            repeated.append(head)
        if trained or lm_head in seen:
            alike[(*layers, seen.get(lm_head))].append(head)
    if untrained:
        yield f"residual layers of zeros only, never trained: heads {untrained}"
    if repeated:
        yield (
            f"all layers of a head have the same weights: heads {repeated}. They were one layer "
            "repeated ([ResBlock] * n) when they were trained"
        )
    for heads in alike.values():
        if len(heads) > 1:
            yield f"heads {heads} are equal: they guess the same token for each place"
