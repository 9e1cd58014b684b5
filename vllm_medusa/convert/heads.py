"""Heads between two formats: plain tensors under canonical names, untouched, with their config.

A format that has to be given more than the heads hold (biases of zeros, copies of an LM head) gets
it here, and ``config.json`` says so under ``medusa.added``; reading such a checkpoint takes it away
again, so that every round trip gives the tensors it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.heads.checkpoint import FORMAT_VERSION
from vllm_medusa.heads.files import CheckpointFiles, digest_tensor
from vllm_medusa.heads.formats import TOKEN_MAP, Layout, layer_name, lm_head_name
from vllm_medusa.heads.info import HeadsInfo
from vllm_medusa.heads.model import HeadsError

MOVED = "other_keys"  # of "medusa": keys of config.json that vLLM would mistake for its own
# What the formats say about the heads themselves: each writes its own anew.
_KNOWN = {
    *("architectures", "model_type", "version", "base_model_name_or_path", "medusa"),
    *("medusa_num_heads", "medusa_num_layers", "num_medusa_heads", "num_heads"),
    *("num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size"),
    *("medusa_fc_bias", "original_lm_head"),
}


@dataclass(frozen=True)
class Heads:
    """Heads as they are stored: every tensor bit by bit, in its own dtype."""

    label: str  # what errors call them
    tensors: dict[str, Tensor]  # canonical names, see `heads.formats`
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None  # the target's; None: nobody said
    base_model: str | None
    medusa: dict[str, Any]  # config.json's "medusa", without "added"
    other: dict[str, Any]  # keys of config.json that are no format's
    spare: Tensor | None = None  # a copy of the target's LM head that came with the checkpoint
    added: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a user should know of this conversion

    @classmethod
    def read(cls, files: CheckpointFiles, layout: Layout, info: HeadsInfo) -> Heads:
        """Load a described checkpoint; raises `HeadsError` for values that are not finite."""
        canonical = {original: name for name, original in layout.names.items()}
        tensors = {}
        for name, tensor in files.tensors(canonical):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise HeadsError(
                    f"{files.label}: {name!r} holds NaN or infinity. The training that made it "
                    "diverged: retrain it, there is nothing to convert"
                )
            tensors[canonical[name]] = tensor
        if info.num_heads == 1:  # one for each head and one for all are the same then
            tensors = {n.replace("lm_head.", "lm_heads.0."): t for n, t in tensors.items()}
        medusa = dict(info.medusa)
        added = medusa.pop("added", None)
        # beside a full model config.json is the model's, not the heads'
        other = {} if info.includes_base else files.config
        moved = medusa.get(MOVED)
        if isinstance(moved, Mapping):
            other = dict(moved) | other
            del medusa[MOVED]
        heads = cls(
            label=files.label,
            tensors=tensors,
            num_heads=info.num_heads,
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            base_model=info.base_model,
            medusa=medusa,
            other={key: value for key, value in other.items() if key not in _KNOWN},
        )
        return heads._without(added) if isinstance(added, Mapping) else heads

    @property
    def bias(self) -> bool:
        """Whether the residual layers have biases."""
        return any(name.startswith("blocks.") and name.endswith(".bias") for name in self.tensors)

    @property
    def lm_heads(self) -> list[Tensor]:
        """Weights of the stored LM heads: one each, one for all, or none."""
        return [t for n, t in self.tensors.items() if _is_lm_head(n) and n.endswith(".weight")]

    @property
    def lm_head_bias(self) -> bool:
        """Whether stored LM heads have biases."""
        return any(_is_lm_head(name) and name.endswith(".bias") for name in self.tensors)

    @property
    def token_map(self) -> Tensor | None:
        """Target token ids of the draft vocabulary."""
        return self.tensors.get(TOKEN_MAP)

    def with_biases(self) -> Heads:
        """Add biases of zeros, which change nothing, to layers without."""
        if self.bias or not self.num_layers:
            return self
        zeros = {
            layer_name(head, layer, "bias"): torch.zeros(
                self.hidden_size, dtype=self.tensors[layer_name(head, layer)].dtype
            )
            for head in range(self.num_heads)
            for layer in range(self.num_layers)
        }
        return replace(
            self,
            tensors=self.tensors | zeros,
            added=self.added | {"biases": True},
            notes=(*self.notes, "biases of zeros were added to layers that had none"),
        )

    def with_one_lm_head(self, target: TargetWeights | None) -> Heads:
        """Store a copy of the target's LM head beside heads that have none."""
        if self.lm_heads:
            return self
        rows = self._target_rows(target)
        return replace(
            self,
            tensors=self.tensors | {lm_head_name(None): rows},
            added=self.added | {"lm_heads": {"from": "target", "sha256": digest_tensor(rows)}},
            notes=(*self.notes, "a copy of the target's LM head was stored: the heads share it"),
        )

    def with_own_lm_heads(self, target: TargetWeights | None) -> Heads:
        """Give each head an LM head: copies of the one for all, or of the target's."""
        one = lm_head_name(None)
        if len(self.lm_heads) == self.num_heads and one not in self.tensors:
            return self
        shared = not self.lm_heads
        rows = self._target_rows(target) if shared else self.tensors[one]
        rest = {name: tensor for name, tensor in self.tensors.items() if not _is_lm_head(name)}
        whose = "the target's" if shared else "the one"
        return replace(
            self,
            tensors=rest | {lm_head_name(head): rows for head in range(self.num_heads)},
            added=self.added
            | {"lm_heads": {"from": "target" if shared else "one", "sha256": digest_tensor(rows)}},
            notes=(*self.notes, f"each head was given a copy of {whose} LM head, which they share"),
        )

    def without_lm_heads(self, target: TargetWeights | None) -> Heads:
        """Leave LM heads out that are the target's, value by value; refuse to lose others."""
        if not self.lm_heads:
            return self
        if target is not None and not self.lm_head_bias:
            rows = self._target_rows(target)
            if all(_identical(rows, stored) for stored in self.lm_heads):
                rest = {name: t for name, t in self.tensors.items() if not _is_lm_head(name)}
                note = "the stored LM heads are the target's own: left out"
                return replace(self, tensors=rest, spare=rows, notes=(*self.notes, note))
        against = "give --target to compare"
        if target is not None:
            against = f"they are not those of {target.label}, bit for bit and of the same dtype"
        raise HeadsError(
            f"{self.label} stores LM heads of its own, for which this format has no place: they "
            f"can only be left out where they are copies of the target's ({against}). Take "
            "another format"
        )

    def refuse_token_map(self, name: str) -> None:
        """Raise for a draft vocabulary, in the name of a format that has none."""
        if self.token_map is not None:
            raise HeadsError(
                f"{self.label} scores only {len(self.token_map)} tokens (token_map); {name} has no "
                "place for that. Take native or vllm"
            )

    def refuse_lm_head_bias(self, name: str) -> None:
        """Raise for LM heads with biases, in the name of a format that would lose them."""
        if self.lm_head_bias:
            raise HeadsError(
                f"{self.label} has LM heads with biases; {name} has no place for them. Take native"
            )

    def config(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """``config.json`` of a format: its ``own`` keys, then what no format knows, then ours."""
        base = {} if self.base_model is None else {"base_model_name_or_path": self.base_model}
        medusa = {"format_version": FORMAT_VERSION, **self.medusa}
        if self.added:
            medusa["added"] = self.added
        return {**own, **base, **self.other, "medusa": medusa}

    def _target_rows(self, target: TargetWeights | None) -> Tensor:
        if self.spare is not None:
            return self.spare
        if target is None:
            raise HeadsError(
                f"{self.label} shares the target's LM head and stores none; this format needs a "
                "copy of it. Name the target by --target"
            )
        rows = target.lm_head()
        needed = self.vocab_size or 0
        if self.token_map is not None:
            needed = max(needed, int(self.token_map.max()) + 1)
        if len(rows) < needed:
            raise HeadsError(
                f"{self.label} needs an LM head of {needed} tokens; that of {target.label} has "
                f"{len(rows)}. Give the target of these heads"
            )
        return rows if self.token_map is None else rows[self.token_map]

    def _without(self, added: Mapping[str, Any]) -> Heads:
        """Take away what an earlier conversion added, unless it was changed since."""
        heads = self
        biases = [name for name in heads.tensors if name.startswith("blocks.") and "bias" in name]
        if added.get("biases") and not any(bool(heads.tensors[name].any()) for name in biases):
            rest = {name: t for name, t in heads.tensors.items() if name not in biases}
            heads = replace(heads, tensors=rest)
        copies = added.get("lm_heads")
        if isinstance(copies, Mapping) and heads.lm_heads:
            first = heads.lm_heads[0]
            if all(digest_tensor(stored) == copies.get("sha256") for stored in heads.lm_heads):
                rest = {n: t for n, t in heads.tensors.items() if not _is_lm_head(n)}
                if copies.get("from") == "target":
                    return replace(heads, tensors=rest, spare=first)
                return replace(heads, tensors=rest | {lm_head_name(None): first})
        return heads


@dataclass(frozen=True)
class Output:
    """What a format writes: one file of tensors beside ``config.json``."""

    file: str
    tensors: dict[str, Tensor]  # under the format's names
    config: dict[str, Any]
    notes: tuple[str, ...]


def _is_lm_head(name: str) -> bool:
    return name.startswith("lm_head")


def _identical(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit, which values of zero need not be."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))
