"""What a checkpoint is, whether it is damaged, and whether it fits a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.checkpoint import NO, Check, HeadsInfo, Verdict, fits, peek_heads
from vllm_medusa.heads.files import find_target
from vllm_medusa.heads.fingerprint import config_sizes, match_target
from vllm_medusa.heads.formats import TOKEN_MAP
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
        of_info = [
            *("format", "num_heads", "num_layers", "hidden_size", "vocab_size"),
            *("draft_vocab_size", "token_map", "bias", "num_lm_heads", "lm_head_bias"),
            *("lm_head_rows", "base_model", "includes_base"),
        ]
        own = ["source", "files", "dtypes", "bytes", "parameters", "damage", "fits"]
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
    return Inspection(str(source), info, tree, _scan(info, progress), checks)


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


def _scan(info: HeadsInfo, progress: Progress | None) -> list[str]:
    """Read every tensor once; returns what is damaged: NaN or infinity, a token mapped twice."""
    damage: list[str] = []
    slots = {name: slot for slot, name in info.names.items()}
    total, done = sum(spec.bytes for spec in info.specs.values()), 0
    for name, tensor in info.files.tensors(slots):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            damage.append(f"{name!r} holds NaN or infinity: the training diverged")
        if slots[name] == TOKEN_MAP and tensor.unique().numel() != tensor.numel():
            damage.append(f"{name!r} names some token twice")
        done += info.specs[slots[name]].bytes
        if progress is not None:
            progress(done, total)
    return damage
