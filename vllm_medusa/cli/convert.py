"""`vllm-medusa convert`: heads from any known format to any other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

FORMATS = ("native", "vllm", "v1", "v2", "tgi", "tensorrt-llm")

_DESCRIPTION = """\
Write heads in another format. The source may be in any of them, or a full Medusa-2 model: its
tensors tell which. Tensors are copied bit by bit, each in its own dtype; what a format has no place
for is refused, and what it needs besides is added, said, and taken away by converting back."""

_EPILOG = """\
formats:
  native        what this package saves; vLLM's layout with everything it has no field for
  vllm          for vLLM without this plugin: with a copy of the target's LM head if it is shared
  v1            the reference's medusa_lm_head.pt: biases, an LM head for each head
  v2            the residual blocks alone; the target's LM head is used
  tgi           Text Generation Inference
  tensorrt-llm  TensorRT-LLM"""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "convert",
        help="heads from any known format to any other",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="the heads: a folder, a file or a hub name")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format to write")
    parser.add_argument("--output", "-o", type=_folder, required=True, help="the folder to write")
    parser.add_argument(
        "--target",
        help="the model of these heads, for a copy of its LM head, its sizes and its fingerprint",
    )
    parser.add_argument(
        "--base",
        type=_folder,
        metavar="FOLDER",
        help="of a full Medusa-2 model: also write the model without its heads",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an output that holds nothing but heads"
    )
    parser.set_defaults(run=run)


def _folder(text: str) -> Path:
    """Parse a folder's name; `Path` takes none for the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; name a folder, . for the current one")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 2 for what can't be converted."""
    from vllm_medusa.convert import convert
    from vllm_medusa.heads import HeadsError
    from vllm_medusa.heads.provenance import provenance

    console = Console(stderr=True, highlight=False)
    try:
        done = convert(
            args.source,
            args.to,
            args.output,
            target=args.target,
            base=args.base,
            revision=args.revision,
            overwrite=args.overwrite,
            provenance=provenance(["vllm-medusa", *sys.argv[1:]]),
        )
    except (HeadsError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; {args.output} is as it was")
        return 130
    info = done.info
    print(
        f"{done.file}: {info.num_heads} heads of {info.num_layers} layers as {args.to} "
        f"(from {info.format}), {done.bytes / 1e6:.1f} MB"
    )
    if args.base is not None:
        print(f"{args.base}: the model they were trained with")
    for note in done.notes:
        print(f"note: {note}")
    for warning in done.warnings:
        console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    return 0
