"""What every recipe trains from: a target, known by its weights, and records checked against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_medusa.heads.files import find_target
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.offline.prompts import BadLine
from vllm_medusa.offline.records import Record, load_records, split_heldout
from vllm_medusa.training.target import TargetError
from vllm_medusa.training.texts import Texts

# of a target's config.json: nothing that its hidden states depend on, besides what is known of it
_NOT_COMPUTED = (
    *("_name_or_path", "architectures", "transformers_version"),
    *("dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id", "medusa", "medusa_2"),
)
_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]


class DataError(ValueError):
    """Records that can't be trained on."""


@dataclass(frozen=True)
class Inputs:
    """A target and its texts.

    Attributes:
        source: the target's folder or hub name.
        fingerprint: of its weights, `heads.fingerprint.target_fingerprint`'s.
        dtype: the name of its weights' dtype, if its config says it.
        train: records to train on.
        heldout: records to measure on, maybe none.
        bad: lines of the files that aren't used, with the file each is in.
        config: what of its config.json acts on the same weights, such as RoPE scaling.
        trained_too: how many held-out records were left out, since their prompts are trained on.

    """

    source: str
    fingerprint: dict[str, Any]
    dtype: str | None
    train: list[Record]
    heldout: list[Record]
    bad: list[tuple[Path, BadLine]]
    config: dict[str, Any] = field(default_factory=dict)
    trained_too: int = 0

    @classmethod
    def read(
        cls,
        source: str,
        data: Path,
        *,
        heldout: Path | None = None,
        max_tokens: int | None = None,
    ) -> Inputs:
        """Read everything but the target's weights; `apart` comes next.

        Args:
            source: the target.
            data: a file of records, texts or conversations (`offline.records`).
            heldout: such a file to measure on, if there is one.
            max_tokens: longer records are bad lines; None: as long as the target's context.

        Raises:
            TargetError: no target there.
            PromptError: no such file.

        """
        config, fingerprint = _identify(source)
        context = getattr(config, "max_position_embeddings", None)
        limits = {
            "vocab_size": int(config.vocab_size),
            "max_tokens": max_tokens or context,
            "tokenizer": _tokenizer(source),
        }
        train, found = load_records(data, **limits)
        bad = [(data, line) for line in found]
        measured: list[Record] = []
        if heldout is not None:
            measured, found = load_records(heldout, **limits)
            bad += [(heldout, line) for line in found]
        dtype = getattr(config, "dtype", None)
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return cls(source, fingerprint, name, train, measured, bad, computed_with(source))

    def apart(self, data: Path, heldout: Path | None, share: float) -> Inputs:
        """The same with held-out records whose prompts nothing is trained on.

        Args:
            data: what `train` was read from, for messages.
            heldout: what `heldout` was read from; None: ``share`` of the prompts is held out.
            share: see `records.split_heldout`.

        Raises:
            DataError: too few prompts, or every held-out prompt is trained on.

        """
        if heldout is None:
            try:
                train, measured = split_heldout(self.train, share)
            except ValueError as error:
                raise DataError(f"{data}: {error} Without measuring: --heldout-share 0.") from None
            return replace(self, train=train, heldout=measured)
        prompts = {record.prompt_key for record in self.train}
        measured = [record for record in self.heldout if record.prompt_key not in prompts]
        if not measured:
            raise DataError(
                f"{heldout}: of its {len(self.heldout)} usable records none has a prompt that "
                f"{data} doesn't train on. Hold others out, or leave --heldout away: then "
                "--heldout-share of the prompts is."
            )
        return replace(self, heldout=measured, trained_too=len(self.heldout) - len(measured))


def computed_with(source: str) -> dict[str, Any]:
    """What a target's config.json says of how it computes, beside its weights' fingerprint."""
    config = find_target(source).config
    return {name: value for name, value in config.items() if name not in _NOT_COMPUTED}


def require_labels(texts: Texts, num_heads: int, name: str) -> None:
    """Refuse texts in which some head has nothing to learn.

    Raises:
        DataError: no span is long enough for the last head.

    """
    longest = max((int(rows) for rows in texts.first_row[1:] - texts.first_row[:-1]), default=0)
    usable = longest - 1  # heads that have a label in the longest span
    if usable < 1:
        raise DataError(
            f"{name}: none of {texts.num_records} records has a generated span of 2 tokens or "
            "more, so there is nothing to train on. Let the target write longer "
            "texts (distill --max-tokens)."
        )
    if usable < num_heads:
        raise DataError(
            f"{name}: the longest generated span gives labels to {usable} heads, and {num_heads} "
            f"are wanted. Train --num-heads {usable}, or bring longer texts."
        )


def require_whole_distributions(records: Sequence[Record]) -> None:
    """Refuse records whose soft labels would not be what they were sampled from.

    Raises:
        DataError: some were sampled with top_p or top_k.

    """
    if cut := sum(record.truncated for record in records):
        raise DataError(
            f"{cut} of {len(records)} records were sampled with top_p or top_k, and soft labels "
            "are whole distributions. Train with --labels tokens, or distill without these options."
        )


def _identify(source: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig

    try:
        if not Path(source).exists():
            from huggingface_hub import snapshot_download

            snapshot_download(source, allow_patterns=_FILES)
        config = AutoConfig.from_pretrained(source).get_text_config()
        return config, target_fingerprint(source)
    except (OSError, ValueError) as error:
        if isinstance(error, HeadsError):
            raise TargetError(str(error)) from error
        raise TargetError(f"{source} is not a target that can be read: {error}") from error


def _tokenizer(source: str) -> Any:
    """The target's tokenizer, or None: records of token ids do without."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None


def describe(records: Sequence[Record]) -> str:
    """Count records and tokens, for people."""
    written = sum(record.num_generated for record in records)
    return f"{len(records)} records, {written} generated tokens"
