"""What a checkpoint is, whether anything about it is odd, and whether it fits a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_medusa.heads import hydra_files
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint, find_target
from vllm_medusa.heads.fingerprint import config_sizes, match_target
from vllm_medusa.heads.formats import TOKEN_MAP, Layout
from vllm_medusa.heads.info import HeadsInfo, check_vocab, read_heads, read_token_map
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.heads.scan import Progress, scan_values
from vllm_medusa.tree import TokenTree, TreeError
from vllm_medusa.tree.forms import read_tree

Verdict = Literal["fits", "does not fit", "unknown"]


@dataclass(frozen=True)
class Check:
    """One way in which heads may fit a target or themselves, and whether they do."""

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Inspection:
    """All that can be said of a checkpoint of heads."""

    source: str
    files: dict[str, int]  # name -> bytes
    info: HeadsInfo
    bytes: int  # of the heads' tensors
    parameters: int
    dtypes: dict[str, int]  # name -> number of tensors
    tree: TokenTree | None
    damage: list[str]
    suspicions: list[str]
    checks: list[Check]

    @property
    def fits(self) -> bool:
        """Whether nothing is known to be wrong."""
        return not self.damage and all(check.verdict != "does not fit" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of everything."""
        info = self.info
        return {
            "source": self.source,
            "format": info.format,
            "files": self.files,
            "num_heads": info.num_heads,
            "num_layers": info.num_layers,
            "hidden_size": info.hidden_size,
            "vocab_size": info.vocab_size,
            "draft_vocab_size": info.draft_vocab_size,
            "token_map": info.token_map,
            "bias": info.bias,
            "num_lm_heads": info.num_lm_heads,
            "lm_head_bias": info.lm_head_bias,
            "lm_head_rows": info.lm_head_rows,
            "dtypes": self.dtypes,
            "bytes": self.bytes,
            "parameters": self.parameters,
            "base_model": info.base_model,
            "includes_base": info.includes_base,
            "tree": None if self.tree is None else self.tree.to_lists(),
            "medusa": {key: value for key, value in info.medusa.items() if key != "tree"},
            "damage": self.damage,
            "suspicions": self.suspicions,
            "checks": [vars(check) for check in self.checks],
            "fits": self.fits,
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
    files = find_checkpoint(source, revision)
    if hydra_files.is_hydra(files.files):
        info = hydra_files.describe(files)
        layout = hydra_files.layout_of(files, info)
    else:
        _, layout, info = read_heads(files)
    specs = files.specs(layout.names.values())
    weights = [spec for name, spec in specs.items() if name != layout.names.get(TOKEN_MAP)]
    tree, checks = _own_tree(info)
    if target is not None:
        checks += _against(files, layout, info, target, source)
    scan = scan_values(files, layout, progress)
    paths = sorted({files.files[name] for name in specs})
    return Inspection(
        source=str(source),
        files={path.name: path.stat().st_size for path in paths},
        info=info,
        bytes=sum(spec.bytes for spec in specs.values()),
        parameters=sum(spec.num_values for spec in weights),
        dtypes=dict(Counter(str(spec.dtype).removeprefix("torch.") for spec in specs.values())),
        tree=tree,
        damage=scan.damage,
        suspicions=[*_contradictions(layout, info), *scan.suspicions],
        checks=checks,
    )


def _own_tree(info: HeadsInfo) -> tuple[TokenTree | None, list[Check]]:
    if info.tree is None:
        return None, []
    try:
        tree = read_tree(info.tree)
    except TreeError as error:
        return None, [Check("tree", "does not fit", f"the tree in its config is none: {error}")]
    ranks = max(tree.ranks) + 1
    if tree.max_depth > info.num_heads:
        text = f"its tree has depth {tree.max_depth}, but there are {info.num_heads} heads"
    elif info.draft_vocab_size is not None and ranks > info.draft_vocab_size:
        text = f"its tree takes rank {ranks - 1} of {info.draft_vocab_size} tokens"
    else:
        text = f"depth {tree.max_depth} of {info.num_heads} heads, ranks up to {ranks - 1}"
        return tree, [Check("tree", "fits", text)]
    return tree, [Check("tree", "does not fit", text)]


def _against(
    files: CheckpointFiles, layout: Layout, info: HeadsInfo, target: str | Path, source: str | Path
) -> Iterator[Check]:
    sizes = config_sizes(find_target(target).config)
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    verdict: Verdict = "unknown" if hidden is None else "fits"
    text = f"{info.hidden_size}; the target has {hidden}"
    yield Check("hidden size", verdict if hidden in (None, info.hidden_size) else _NOT, text)
    yield _vocabulary(files, layout, info, vocab)
    match = match_target(info, target, heads=source)
    verdicts: dict[str, Verdict] = {"same": "fits", "different": _NOT, "unknown": "unknown"}
    yield Check("fingerprint", verdicts[match.verdict], match.reason)


def _vocabulary(
    files: CheckpointFiles, layout: Layout, info: HeadsInfo, vocab: int | None
) -> Check:
    name = "vocabulary"
    if vocab is None:
        return Check(name, "unknown", "the target's config does not say its size")
    if info.vocab_size not in (None, vocab):
        return Check(name, _NOT, f"{info.vocab_size} tokens; the target has {vocab}")
    try:
        if info.token_map:
            read_token_map(files, layout, vocab)
        check_vocab(files, layout, info, vocab)
    except HeadsError as error:
        return Check(name, _NOT, str(error))
    rows = info.lm_head_rows
    if info.token_map:
        return Check(name, "fits", f"{info.draft_vocab_size} of the target's {vocab} tokens")
    if rows is None:
        return Check(name, "fits", f"the heads use the target's LM head of {vocab} tokens")
    padding = f" and {rows - vocab} rows of padding" if rows > vocab else ""
    return Check(name, "fits", f"{vocab} tokens, as the target{padding}")


_NOT: Verdict = "does not fit"


def _contradictions(layout: Layout, info: HeadsInfo) -> Iterator[str]:
    """Numbers in config.json that the tensors prove wrong; the tensors are believed."""
    stated: list[tuple[str, Any]] = [
        ("medusa_num_heads", info.num_heads),
        ("num_medusa_heads", info.num_heads),
        ("medusa_num_layers", info.num_layers),
    ]
    if not info.includes_base:  # else config.json is the model's
        stated += [
            ("num_heads", info.num_heads),
            ("num_hidden_layers", info.num_layers),
            ("hidden_size", info.hidden_size),
        ]
        if info.draft_vocab_size is not None:
            stated.append(("truncated_vocab_size", info.draft_vocab_size))
        if info.format == "vllm":
            single = layout.num_lm_heads != layout.num_heads or "lm_head.weight" in layout.names
            stated += [("medusa_fc_bias", info.bias), ("original_lm_head", single)]
    for key, found in stated:
        if key in info.config and info.config[key] != found:
            yield f"config.json says {key} {info.config[key]!r}; the tensors say {found!r}"
    if info.format == "vllm" and info.bias and "medusa_fc_bias" not in info.config:
        yield "config.json lacks medusa_fc_bias: stock vLLM would drop the layers' biases"
