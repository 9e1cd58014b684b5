"""`vllm-medusa train`: heads for a target. What all methods share; a method's own is beside it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli.generate import at_least_zero, from_zero, positive, seed_number

if TYPE_CHECKING:
    from vllm_medusa.training.inputs import Inputs

# A method is a module with add_options(parser), check(args) and train(args, inputs, workers,
# console) -> exit status; both checks raise ValueError. It also takes the options of those before.
METHODS = {
    "medusa-1": "vllm_medusa.cli.train_medusa1",
    "medusa-2": "vllm_medusa.cli.train_medusa2",
}
_SHOWN_BAD_LINES = 20

_DESCRIPTION = """\
Train heads for a target on texts, best those that it wrote itself (`vllm-medusa distill`). Killed
or interrupted, the same command goes on where it stopped, and ends with the same weights, bit for
bit. Several GPUs: `accelerate launch --num-processes N -m vllm_medusa.cli train ...`."""

_EPILOG = """\
Data: JSON lines with "token_ids" and "generated" (distill's records), "messages", "conversations"
(ShareGPT; assistant turns are trained) or "text" (all of it is).

Output: model.safetensors and config.json as vLLM reads them, training/log.jsonl (a line for each
step and each measurement), training/curves.png and training/heldout.jsonl, the records held out:
calibrate on these. Until the run is complete also training/work with its state."""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "train",
        help="train heads for a target; resumable",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def methods() -> list[str]:
    """Methods whose module is there."""
    return [name for name, module in METHODS.items() if find_spec(module) is not None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("model", help="the target: a folder or a hub name")
    parser.add_argument("--method", choices=methods(), default="medusa-1")
    files = parser.add_argument_group("files")
    files.add_argument("--data", "-i", type=Path, required=True, help="texts to train on")
    files.add_argument("--output", "-o", type=Path, required=True, help="folder for the heads")
    files.add_argument("--heldout", type=Path, help="texts to measure on")
    files.add_argument(
        "--heldout-share",
        type=_share,
        default=0.05,
        help="without --heldout: share of the prompts that is held out (0.05; 0: none)",
    )
    files.add_argument(
        "--on-bad-line",
        choices=("refuse", "skip"),
        default="refuse",
        help="refuse: train nothing while a file has a bad line (default); skip: leave it out",
    )
    files.add_argument(
        "--max-text-tokens", type=positive, metavar="N", help="longer texts are bad lines"
    )
    files.add_argument("--overwrite", action="store_true", help="throw away the output's run")

    heads = parser.add_argument_group("heads")
    heads.add_argument("--num-heads", type=positive, default=5, help="(5)")
    heads.add_argument("--num-layers", type=positive, default=1, help="residual layers a head (1)")
    heads.add_argument(
        "--lm-heads",
        choices=("shared", "own"),
        default="shared",
        help="shared: all heads use the target's LM head (default); own: each trains a copy of it",
    )
    heads.add_argument(
        "--draft-vocab", type=positive, metavar="N", help="predict only the N most frequent tokens"
    )
    heads.add_argument(
        "--save-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--labels",
        choices=("soft", "tokens"),
        default="soft",
        help="soft: the target's distribution over each token (default); tokens: the text's own",
    )
    training.add_argument("--decay", type=_decay, default=0.8, help="head k weighs DECAY^k (0.8)")
    training.add_argument("--epochs", type=positive, help="passes over the texts (3)")
    training.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="tokens a step (256 to 4096: about 1500 steps)",
    )
    training.add_argument(
        "--accumulate", type=positive, default=1, metavar="N", help="micro-batches a step (1)"
    )
    training.add_argument(
        "--learning-rate",
        type=_positive_number,
        help="the heads' peak (1e-3; more for targets narrower than 1280)",
    )
    training.add_argument(
        "--warmup-steps",
        type=from_zero,
        metavar="N",
        help="at most a tenth (50; in medusa-2's joint stage 20)",
    )
    training.add_argument("--weight-decay", type=at_least_zero, default=0.0)
    training.add_argument("--clip", type=_positive_number, default=1.0, help="gradient norm (1.0)")
    training.add_argument("--seed", type=seed_number, default=0)
    training.add_argument(
        "--measure-every", type=positive, default=500, metavar="N", help="steps (500)"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    machine.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="the target computes in; auto: its own on GPUs, float32 on CPUs",
    )
    machine.add_argument(
        "--quantization", choices=("4bit", "8bit"), help="of the target, by bitsandbytes"
    )
    machine.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="heads compute in; auto: bfloat16 where the hardware is made for it",
    )
    for method in methods():
        importlib.import_module(METHODS[method]).add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 1 if training broke off, 2 for bad input."""
    console = errors = Console(file=sys.stderr, highlight=False)
    from vllm_medusa.offline.records import write_records
    from vllm_medusa.training.medusa1 import NotFiniteError
    from vllm_medusa.training.state import check_output
    from vllm_medusa.training.workers import Workers

    method = importlib.import_module(METHODS[args.method])
    main = True
    try:
        _refuse_options_of_others(args)
        method.check(args)
        _refuse_inputs_in_output(args)
        workers = Workers(args.device)
        main = workers.main
        if main:  # the others would look while this one makes it
            check_output(args.output)
        else:
            console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
        inputs = _read(args, console)
        status: int = method.train(args, inputs, workers, console)
        if workers.main and args.heldout is None and inputs.heldout:
            write_records(args.output / "training" / "heldout.jsonl", inputs.heldout)
        return status
    except NotFiniteError as error:  # which all processes meet
        console.print(f"[bold red]stopped:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except (ValueError, OSError) as error:
        where = "" if main else f" in process {workers.rank}"
        errors.print(f"[bold red]error{where}:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {args.output}")
        return 130


def _refuse_options_of_others(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that the chosen method would ignore."""
    for method in methods()[methods().index(args.method) + 1 :]:
        others = argparse.ArgumentParser()
        importlib.import_module(METHODS[method]).add_options(others)
        for name, default in vars(others.parse_args([])).items():
            if getattr(args, name, default) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} is an option of --method {method}; the method is "
                    f"{args.method}. Choose that method, or leave the option out."
                )


def _refuse_inputs_in_output(args: argparse.Namespace) -> None:
    """Raise ValueError for an input that the run would remove."""
    from vllm_medusa.training.medusa2_result import ADAPTER, DEGRADED, MODEL
    from vllm_medusa.training.state import check_inputs

    check_inputs(
        args.output,
        {
            "the target": args.model,
            "--data": args.data,
            "--heldout": args.heldout,
            "--start-heads": args.start_heads,
        },
        overwrite=args.overwrite,
        removed=("training", MODEL, DEGRADED, ADAPTER),
    )


def _read(args: argparse.Namespace, console: Console) -> Inputs:
    """Read the data; bad lines are refused or told."""
    from vllm_medusa.training.inputs import (
        DataError,
        Inputs,
        describe,
        require_whole_distributions,
    )

    inputs = Inputs.read(
        args.model,
        args.data,
        heldout=args.heldout,
        max_tokens=args.max_text_tokens,
    )
    shown = [f"{file}, line {bad.line}: {bad.reason}" for file, bad in inputs.bad]
    rest = len(shown) - _SHOWN_BAD_LINES
    shown = shown[:_SHOWN_BAD_LINES] + ([f"and {rest} more"] if rest > 0 else [])
    if shown and args.on_bad_line == "refuse":
        raise DataError(
            f"{len(inputs.bad)} bad lines; mend them, or pass --on-bad-line skip.\n  "
            + "\n  ".join(shown)
        )
    if shown:
        console.print(f"skipping {len(inputs.bad)} bad lines:", style="yellow")
        for text in shown:
            console.print(f"  {escape(text)}", soft_wrap=True)
    if not inputs.train:
        raise DataError(f"{args.data}: no usable records in it.")
    inputs = inputs.apart(args.data, args.heldout, args.heldout_share)
    if args.labels == "soft":
        require_whole_distributions(inputs.train)
    if inputs.trained_too:
        console.print(
            f"{args.heldout}: {inputs.trained_too} records are left out, since their prompts are "
            "trained on",
            style="yellow",
        )
    console.print(f"training on {describe(inputs.train)}; held out: {describe(inputs.heldout)}")
    return inputs


def _share(text: str) -> float:
    value = at_least_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number from 0, below 1")
    return value


def _decay(text: str) -> float:
    value = _positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use more than 0, at most 1")
    return value


def _positive_number(text: str) -> float:
    value = at_least_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number above 0")
    return value
