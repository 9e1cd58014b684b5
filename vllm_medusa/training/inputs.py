"""Inputs of all methods: a target and its fingerprint, its records, and heads to start from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.eagle_checkpoint import drafter_method
from vllm_medusa.heads.eagle_tensors import Layout
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint, find_target
from vllm_medusa.heads.fingerprint import fingerprint_of
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.defaults import readable
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.offline.records import Record, load_records, split_heldout
from vllm_medusa.options import described
from vllm_medusa.training.options import HeadOptions, TextFiles, TrainOptions
from vllm_medusa.training.rows import Texts

_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]


def read_texts(
    options: TrainOptions, limits: dict[str, Any], progress: Progress = SILENT
) -> tuple[list[Record], list[Record]]:
    """The records to train on, and those to measure on, which may be none.

    Raises PromptError: no such file, or bad lines that are not to be skipped; ValueError: no
    records, or unusable ones.
    """
    files = options.files
    read = {
        path: read_usable(path, limits, files.on_bad_line, progress)
        for path in (files.data, files.heldout)
        if path
    }
    train = read[files.data]
    if not train:
        raise ValueError(f"{files.data} holds no usable records.")
    if files.heldout is None:
        try:
            train, heldout = split_heldout(train, files.heldout_share)
        except ValueError as error:
            raise ValueError(
                f"{files.data}: {error} To train without measuring: --heldout-share 0."
            ) from None
    else:
        heldout = _untrained(files, train, read[files.heldout], progress)
    cut = sum(record.truncated for record in train)
    if options.training.labels == "soft" and cut:
        raise ValueError(
            f"{cut} of {len(train)} records were sampled with top_p or top_k, but soft labels need "
            "full distributions. Train with --labels tokens, or distill without these options."
        )
    progress.note(f"training on {_count(train)}; held out: {_count(heldout)}")
    return train, heldout


def find_start(heads: HeadOptions) -> tuple[HeadOptions, CheckpointFiles | None]:
    """The options with the shape of the heads to continue from, and their files; None: new heads.

    Raises ValueError: they are of another kind, or another shape is requested.
    """
    if heads.start_heads is None:
        return heads, None
    start = find_checkpoint(heads.start_heads)
    if drafter_method(start) == "eagle3":
        layers = Layout.read(start).layers
        found: dict[str, Any] = {"kind": "eagle3", "aux_layers": tuple(layers or ())}
    else:
        info = peek_heads(start)
        found = {"kind": "hydra" if info.is_hydra else "medusa"}
        found |= {"num_heads": info.num_heads, "num_layers": info.num_layers}
    for option in described(type(heads)):
        requested, value = getattr(heads, option.name), found.get(option.name)
        other = value is not None and requested != value
        if other and (option.name == "kind" or requested != option.default):
            raise ValueError(
                f"{option.flag} is {requested}, but --start-heads {start.label} has {value}. Use "
                f"{option.flag} {value}."
            )
    return replace(heads, **found), start


def limits_of(source: str, config: Any) -> dict[str, Any]:
    """A target's arguments of `load_records`, given transformers' text config."""
    from transformers import AutoTokenizer

    tokenizer = None  # records of token ids do not need it
    with suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(source)
    return {
        "vocab_size": int(config.vocab_size),
        "max_tokens": getattr(config, "max_position_embeddings", None),
        "tokenizer": tokenizer,
    }


def read_usable(
    path: Path, limits: dict[str, Any], on_bad_line: str, progress: Progress
) -> list[Record]:
    """Read the records of a file; bad lines are refused, or skipped with a warning."""
    records, bad = load_records(path, **limits)
    settle_bad_lines(path, bad, on_bad_line, progress)
    return records


def _untrained(
    files: TextFiles, train: list[Record], heldout: list[Record], progress: Progress
) -> list[Record]:
    """The held-out records whose prompts are not trained on.

    Raises ValueError: there are none.
    """
    prompts = {record.prompt_key for record in train}
    kept = [record for record in heldout if record.prompt_key not in prompts]
    if not kept:
        raise ValueError(
            f"{files.heldout}: none of its {len(heldout)} usable records can be held out, because "
            f"all their prompts are in {files.data}. Use other records, or omit --heldout to hold "
            "out --heldout-share of the prompts."
        )
    if left_out := len(heldout) - len(kept):
        progress.warn(
            f"{files.heldout}: {left_out} records are skipped, because their prompts are trained on"
        )
    return kept


def require_labels(texts: Texts, num_heads: int, name: str) -> None:
    """Refuse texts in which some head has no labels.

    Raises ValueError: no span is long enough for the last head.
    """
    rows = (end - start for start, end in texts.spans())
    usable = max(rows, default=1) - 1  # heads with a label in the longest span
    if usable < num_heads:
        fewer = f"Train --num-heads {usable}, or use" if usable else "Use"
        raise ValueError(
            f"{name}: the longest generated span of {len(texts.records)} records has labels for "
            f"{usable} heads, but {num_heads} are requested. {fewer} longer texts (distill "
            "--max-tokens)."
        )


def identify(source: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Find a target: transformers' text config, its fingerprint, and its config.json."""
    from transformers import AutoConfig

    with readable(source):
        if not Path(source).exists():
            from huggingface_hub import snapshot_download

            snapshot_download(source, allow_patterns=_FILES)
        config = AutoConfig.from_pretrained(source).get_text_config()
    files = find_target(source)
    return config, fingerprint_of(files), files.config


def _count(records: Sequence[Record]) -> str:
    written = sum(record.num_generated for record in records)
    return f"{len(records)} records, {written} generated tokens"
