"""Common inputs of all methods: a target, identified by its weights, and records that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.heads.files import find_target
from vllm_medusa.heads.fingerprint import fingerprint_of
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.offline.records import Record, load_records, split_heldout
from vllm_medusa.training.options import TextFiles, TrainOptions
from vllm_medusa.training.rows import row_ranges
from vllm_medusa.training.target import TargetError

# keys of a target's config.json that its hidden states don't depend on, or that are known otherwise
_NOT_COMPUTED = (
    *("_name_or_path", "architectures", "transformers_version"),
    *("dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id", "medusa", "medusa_2"),
)
_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]


class DataError(ValueError):
    """Records that are unusable for training."""


@dataclass(frozen=True)
class Inputs:
    """A target and its texts."""

    source: str  # the target's folder or hub name
    fingerprint: dict[str, Any]  # of its weights, `heads.fingerprint.target_fingerprint`'s
    dtype: str | None  # its weights' dtype, if it is in its config
    config: dict[str, Any]  # config.json keys that affect the same weights, such as RoPE scaling
    train: list[Record]  # to train on
    heldout: list[Record]  # to measure on, with prompts not trained on; may be empty

    @classmethod
    def read(cls, options: TrainOptions, progress: Progress = SILENT) -> Inputs:
        """Read everything except the target's weights.

        Raises:
            TargetError: no such target.
            PromptError: no such file, or bad lines without ``skip``.
            DataError: no records, or unusable ones.

        """
        files = options.files
        config, fingerprint, written = _identify(options.model)
        limits = {
            "vocab_size": int(config.vocab_size),
            "max_tokens": files.max_text_tokens or getattr(config, "max_position_embeddings", None),
            "tokenizer": find_tokenizer(options.model),
        }
        read = {path: load_records(path, **limits) for path in (files.data, files.heldout) if path}
        for path, (_, bad) in read.items():
            settle_bad_lines(path, bad, files.on_bad_line, progress)
        train = read[files.data][0]
        if not train:
            raise DataError(f"{files.data}: no usable records in it.")
        if files.heldout is None:
            try:
                train, heldout = split_heldout(train, files.heldout_share)
            except ValueError as error:
                raise DataError(
                    f"{files.data}: {error} Without measuring: --heldout-share 0."
                ) from None
        else:
            heldout = _untrained(files, train, read[files.heldout][0], progress)
        cut = sum(record.truncated for record in train)
        if options.training.labels == "soft" and cut:
            raise DataError(
                f"{cut} of {len(train)} records were sampled with top_p or top_k, but soft labels "
                "need whole distributions. Train with --labels tokens, or distill without these "
                "options."
            )
        progress.note(f"training on {_count(train)}; held out: {_count(heldout)}")
        dtype = getattr(config, "dtype", None)
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        computed = {key: value for key, value in written.items() if key not in _NOT_COMPUTED}
        return cls(options.model, fingerprint, name, computed, train, heldout)


def _untrained(
    files: TextFiles, train: list[Record], heldout: list[Record], progress: Progress
) -> list[Record]:
    """Held-out records whose prompts are not trained on."""
    prompts = {record.prompt_key for record in train}
    kept = [record for record in heldout if record.prompt_key not in prompts]
    if not kept:
        raise DataError(
            f"{files.heldout}: none of its {len(heldout)} usable records has a prompt that "
            f"{files.data} doesn't train on. Use other records, or omit --heldout, so that "
            "--heldout-share of the prompts is held out."
        )
    if left_out := len(heldout) - len(kept):
        progress.warn(
            f"{files.heldout}: {left_out} records are skipped, because their prompts are trained on"
        )
    return kept


def require_labels(records: Sequence[Record], num_heads: int, name: str) -> None:
    """Refuse records in which some head has no labels.

    Raises:
        DataError: no span is long enough for the last head.

    """
    rows = [end - start for record in records for start, end in row_ranges(record)]
    usable = max(rows, default=1) - 1  # heads with a label in the longest span
    if usable < num_heads:
        fewer = f"Train --num-heads {usable}, or use" if usable else "Use"
        raise DataError(
            f"{name}: the longest generated span of {len(records)} records has labels for {usable} "
            f"heads, but {num_heads} are requested. {fewer} longer texts (distill --max-tokens)."
        )


def _identify(source: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Transformers' config, the fingerprint, and the raw config.json."""
    from transformers import AutoConfig

    if Path(source).is_file():
        raise TargetError(
            f"{source} is a file; a target is a folder in transformers' format, with "
            "config.json and safetensors. For a GGUF file, pass the model that it was made from."
        )
    try:
        if not Path(source).exists():
            from huggingface_hub import snapshot_download

            snapshot_download(source, allow_patterns=_FILES)
        config = AutoConfig.from_pretrained(source).get_text_config()
        files = find_target(source)
        return config, fingerprint_of(files), files.config
    except (OSError, ValueError) as error:
        if isinstance(error, HeadsError):
            raise TargetError(str(error)) from error
        raise TargetError(f"{source} is not a readable target: {error}") from error


def find_tokenizer(source: str) -> Any:
    """The target's tokenizer, or None: records of token ids don't need it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None


def _count(records: Sequence[Record]) -> str:
    written = sum(record.num_generated for record in records)
    return f"{len(records)} records, {written} generated tokens"
