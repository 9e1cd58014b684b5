"""What a conversion may need of the target: its sizes and a copy of its LM head."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from vllm_medusa.heads.files import CheckpointFiles, find_target
from vllm_medusa.heads.fingerprint import config_sizes
from vllm_medusa.heads.info import FLOATS
from vllm_medusa.heads.model import HeadsError

# by what architectures call them; the input embeddings serve where the LM head is tied to them
_LM_HEAD = re.compile(r"(?:.+\.)?(?:lm_head|embed_out|output)\.weight")
_EMBEDDINGS = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight"
)


class TargetWeights:
    """A target's files, opened when something of them is asked for."""

    def __init__(self, source: str | Path) -> None:
        self.files: CheckpointFiles = find_target(source)
        self.label = str(source)
        sizes = config_sizes(self.files.config)
        self.hidden_size: int | None = sizes["hidden_size"]
        self.vocab_size: int | None = sizes["vocab_size"]

    def lm_head(self) -> Tensor:
        """The LM head [V, H] in its own dtype, padding rows left out.

        Raises:
            HeadsError: There is none by a known name, it is quantised, or it has a bias, which a
                copy beside the heads would lose.

        """
        name = self._lm_head_name()
        bias = f"{name.removesuffix('weight')}bias"
        if bias in self.files.files:
            raise HeadsError(
                f"target {self.label!r}: its LM head has a bias ({bias!r}), which a copy would "
                "lose. Take the format native, which needs no copy"
            )
        ((_, weight),) = self.files.tensors([name])
        if weight.dtype not in FLOATS or weight.dim() != 2:
            raise HeadsError(
                f"target {self.label!r}: {name!r} is {weight.dtype} {list(weight.shape)}, not a "
                "plain matrix: quantised LM heads are not copied. Give the original model"
            )
        return weight[: self.vocab_size].contiguous()

    def _lm_head_name(self) -> str:
        tied = self.files.config.get("tie_word_embeddings")
        for pattern in (_LM_HEAD,) if tied is False else (_LM_HEAD, _EMBEDDINGS):
            found = [name for name in self.files.files if pattern.fullmatch(name)]
            outside = [name for name in found if not re.search(r"\.\d+\.", name)]
            if outside:
                return min(outside, key=len)
        raise HeadsError(
            f"target {self.label!r}: no tensor is named like an LM head or embeddings "
            "(lm_head.weight, model.embed_tokens.weight). Is it quantised, or part of a model?"
        )
