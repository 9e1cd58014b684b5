"""What `vllm-medusa adapt` makes sure of before it begins: hours later would be too late."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.cli.generate import report_bad_lines
from vllm_medusa.files import digest as digest_of
from vllm_medusa.offline.prompts import BadLine, Prompt, PromptError, read_prompts

REPORT = "report.json"
# What adapt writes, so what it may replace.
OURS = {
    *("config.json", "model.safetensors", "calibration.safetensors", "target"),
    *("accuracy.png", "budgets.png", "calibration.png", "curves.png", "tree.png"),
    *("report.md", REPORT),
}
_EXTRAS = {
    "vllm": "cpu",
    "transformers": "train",
    "matplotlib": "train",
    "peft": "train",
    "accelerate": "train",
}
_RECORD_BYTES = 16  # of a token in a file of records: its id in digits, its text
_LEAST_FREE = 1 << 30


class AdaptError(ValueError):
    """Something about the command that has to be changed first."""


@dataclass(frozen=True)
class Facts:
    """What the checks found out."""

    target: dict[str, Any]  # its fingerprint
    prompts: int
    prompts_digest: str


def check(args: argparse.Namespace, console: Console) -> Facts:
    """Look at everything that is cheap to look at.

    Raises:
        ValueError: something has to be changed; the message says what.

    """
    require_extras()
    _check_output(args)
    prompts = _check_prompts(args, console)
    target = _check_target(args)
    _check_disk(args, prompts, target)
    return Facts(target, prompts, digest_of(args.prompts))


def require_extras() -> None:
    """Raise `AdaptError` naming the extras that have to be installed."""
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_EXTRAS[name] for name in missing}))
        raise AdaptError(
            f"adapt needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install 'vllm-medusa[{extras}]'"
        )


def written_by_adapt(folder: Path) -> str | None:
    """The key of the adapt whose heads a folder holds, or None."""
    try:
        return str(json.loads((folder / REPORT).read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_output(args: argparse.Namespace) -> None:
    output: Path = args.output
    place = output.resolve()  # a link stays, and what it leads to is replaced
    if Path.cwd().is_relative_to(place):
        raise AdaptError(
            f"--output {output} is the folder that this was started in, or one around it, and is "
            f"replaced as a whole. Name a folder in it, such as {output / 'heads'}."
        )
    for parent in (output.parent, place.parent):
        if not parent.is_dir():
            raise AdaptError(f"{output}: no folder {parent}. Make it, or name another --output.")
    if args.work.resolve().is_relative_to(place):
        raise AdaptError(
            f"--work {args.work} is in --output {output}, which is empty until the end and then "
            "replaced as a whole. Name another --work, or none: a folder beside the output."
        )
    if output.exists() and not output.is_dir():
        raise AdaptError(f"{output} is a file; name a folder for the heads.")
    if output.is_dir() and any(output.iterdir()) and written_by_adapt(output) is None:
        raise AdaptError(
            f"{output} holds something that adapt did not write. Name another --output, or remove "
            "it yourself."
        )
    _check_replaced(args, place)


def _check_replaced(args: argparse.Namespace, place: Path) -> None:
    """Refuse an output that has what is read, or what others put there."""
    for source in map(Path, (args.target, args.prompts)):
        if source.exists() and source.resolve().is_relative_to(place):
            raise AdaptError(
                f"{source}, which is read, is in --output {args.output}, which is replaced as a "
                "whole. Name another --output."
            )
    if not args.overwrite or not place.is_dir():
        return
    if strangers := sorted(path.name for path in place.iterdir() if path.name not in OURS):
        raise AdaptError(
            f"{args.output} also holds {', '.join(strangers[:4])}, which --overwrite would delete. "
            "Name another --output, or move them away."
        )


def _check_prompts(args: argparse.Namespace, console: Console) -> int:
    """Read the whole file; returns how many different prompts can be used."""
    different, bad = set(), []
    for record in read_prompts(args.prompts, args.format, args.column):
        if isinstance(record, BadLine):
            bad.append(record)
        else:
            assert isinstance(record, Prompt)
            different.add((record.text, record.turns, json.dumps(record.history)))
    report_bad_lines(bad, args, console)
    if len(different) < 2:
        raise PromptError(
            f"{args.prompts}: {len(different)} different prompts; at least 2 are needed, one to "
            "train on and one held out, and a few hundred for heads worth having."
        )
    return len(different)


def _check_target(args: argparse.Namespace) -> dict[str, Any]:
    """Return the target's fingerprint; its config and tokenizer have to be readable too."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_medusa.heads.fingerprint import target_fingerprint

    if not Path(args.target).exists():
        _download(args.target)
    try:
        config = AutoConfig.from_pretrained(args.target)
        AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError, KeyError) as error:
        raise AdaptError(f"{args.target} is no model that can be read: {error}") from None
    if config.is_encoder_decoder:
        raise AdaptError(f"{args.target} is an encoder-decoder; heads need a decoder-only model.")
    return target_fingerprint(args.target)


def _download(name: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.jinja"])
    except HFValidationError:
        raise AdaptError(f"{name}: no such folder, and no name of the hub either.") from None
    except Exception as error:  # of the network, of the hub, of its access rules
        raise AdaptError(
            f"{name}: no such folder, and from the hub it can't be had: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _check_disk(args: argparse.Namespace, prompts: int, target: dict[str, Any]) -> None:
    """Refuse a disk that certainly is too small; the cache of hidden states has its own bound."""
    hidden = target.get("hidden_size") or 0
    texts = prompts * args.samples * (args.max_tokens or 512) * _RECORD_BYTES
    layers = (args.num_heads or 5) * (args.num_layers or 1)
    heads = layers * hidden * hidden * 4 * 6  # state, copies, result
    needed = 2 * texts + heads + _LEAST_FREE
    existing = next(p for p in (args.work, *args.work.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise AdaptError(
            f"{existing} has {free / 1e9:.1f} GB free, and records and heads may need "
            f"{needed / 1e9:.1f} GB beside the target's hidden states. Free some, name a --work "
            "folder on another disk, or lower --samples or --max-tokens."
        )
