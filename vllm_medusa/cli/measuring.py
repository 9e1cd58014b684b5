"""What commands that run a target with heads share: the machine's options, the heads' folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    import torch

    from vllm_medusa.training.target import Target

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_machine(group: argparse._ArgumentGroup) -> None:
    """Add the options that say where and how the target computes."""
    group.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="the target computes in; auto: its own on GPUs, float32 on CPUs",
    )
    group.add_argument("--quantization", choices=("4bit", "8bit"), help="of the target")


def machine(args: argparse.Namespace) -> tuple[str, torch.dtype]:
    """Device and dtype from the command line."""
    import torch

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.dtype != "auto":
        return device, getattr(torch, args.dtype)
    if device == "cpu":
        return device, torch.float32
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(args.model).get_text_config().dtype
    return device, own if own in (torch.bfloat16, torch.float16) else torch.float32


def check_folder(heads: Path) -> None:
    """Refuse heads that nothing can be saved beside."""
    if not heads.is_dir():
        raise ValueError(
            f"{heads} is no local folder; what is measured is saved beside the heads. Give the "
            "folder of the heads (download or convert them first)."
        )
    if not os.access(heads, os.W_OK):
        raise ValueError(f"{heads} can't be written to, where the results go; copy the heads.")


def heads_digest(folder: Path) -> str:
    """Tells heads of other weights apart, cheaply; the config may change."""
    from vllm_medusa.heads.digest import digest_heads
    from vllm_medusa.heads.files import find_checkpoint

    return digest_heads(find_checkpoint(folder))


def end_tokens(target: Target) -> set[int]:
    """Ids after which the target writes nothing."""
    ends = getattr(target.model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = target.model.config.get_text_config().eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def position_bar(console: Console, total: int) -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or total == 0,
    )


def terminal() -> Console:
    """Standard output; a file or pipe gets lines wide enough for every table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)
