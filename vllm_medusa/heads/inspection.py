"""Describe a checkpoint, check it for damage, and check whether it fits a target."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.heads.checkpoint import HeadsInfo, peek_heads
from vllm_medusa.heads.files import Progress, find_target
from vllm_medusa.heads.fingerprint import config_sizes, of_target
from vllm_medusa.heads.fit import NO, Check, Inspected, fits
from vllm_medusa.heads.formats import TOKEN_MAP
from vllm_medusa.tree import TokenTree, TreeError
from vllm_medusa.tree.forms import read_tree


@dataclass(frozen=True)
class Inspection(Inspected):
    """All information on a checkpoint of heads."""

    info: HeadsInfo
    tree: TokenTree | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything; ``bytes`` and ``parameters`` are of the heads only."""
        info, specs = self.info, self.info.specs
        of_info = [
            *("format", "num_heads", "num_layers", "hidden_size", "vocab_size"),
            *("draft_vocab_size", "token_map", "bias", "num_lm_heads", "lm_head_bias"),
            *("lm_head_rows", "base_model", "includes_base"),
        ]
        paths = sorted({info.files.files[name] for name in info.names.values()})
        return {
            **{key: getattr(info, key) for key in of_info},
            "source": self.source,
            "files": {path.name: path.stat().st_size for path in paths},
            "dtypes": Counter(str(s.dtype).removeprefix("torch.") for s in specs.values()),
            "bytes": sum(spec.bytes for spec in specs.values()),
            "parameters": sum(s.num_values for slot, s in specs.items() if slot != TOKEN_MAP),
            "damage": self.damage,
            "fits": self.fits,
            "tree": None if self.tree is None else self.tree.to_lists(),
            "medusa": {key: value for key, value in info.medusa.items() if key != "tree"},
            "checks": [vars(check) for check in self.checks],
        }


def inspect_heads(
    source: str | Path,
    target: str | Path | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect every tensor of a checkpoint, and a target's config and samples of its weights.

    Raises HeadsError: no heads, missing tensors or wrong shapes, or no such target.
    """
    info = peek_heads(source, revision=revision)
    tree, checks = _own_tree(info)
    if target is not None:
        sizes = config_sizes(find_target(target).config)
        checks += fits(info, sizes["hidden_size"], sizes["vocab_size"])
        checks.append(of_target(info.files, target))
    damage = info.files.find_damage(info.names.values(), progress)
    if (ids := info.read_token_map()) is not None and ids.unique().numel() != ids.numel():
        damage.append(f"{info.names[TOKEN_MAP]!r} has a duplicate token")
    return Inspection(str(source), checks, damage, info, tree)


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
        text = f"its tree has rank {ranks - 1}, for {info.draft_vocab_size} tokens"
    else:
        text = f"depth {tree.max_depth} of {info.num_heads} heads, ranks up to {ranks - 1}"
        return tree, [Check("tree", "fits", text)]
    return tree, [Check("tree", NO, text)]
