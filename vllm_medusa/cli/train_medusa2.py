"""The method ``medusa-2`` of `vllm-medusa train`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_medusa.cli import train_medusa1
from vllm_medusa.cli.generate import at_least_zero, positive
from vllm_medusa.cli.train_medusa2_job import Medusa2Job, bounds_of

if TYPE_CHECKING:
    from vllm_medusa.training.inputs import Inputs
    from vllm_medusa.training.joint_recipe import JointRecipe
    from vllm_medusa.training.medusa1 import Recipe
    from vllm_medusa.training.workers import Workers


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this method has."""
    group = parser.add_argument_group(
        "medusa-2: after a warm-up of the heads alone, which is medusa-1 by the options above, "
        "heads and a LoRA adapter in the target together. The output holds a new target as well"
    )
    group.add_argument(
        "--start-heads",
        type=Path,
        metavar="HEADS",
        help="trained heads, instead of a warm-up: its options (--epochs, --batch-tokens, "
        "--learning-rate, --accumulate) then do nothing, and the heads' shape is theirs",
    )
    group.add_argument("--lora-rank", type=positive, default=32, help="(32)")
    group.add_argument("--lora-alpha", type=at_least_zero, default=16.0, help="(16)")
    group.add_argument("--lora-dropout", type=at_least_zero, default=0.0, help="(0)")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="linear layers such as q_proj (all but the LM head)",
    )
    group.add_argument(
        "--lm-loss",
        choices=("auto", "kl", "cross-entropy"),
        default="auto",
        help="the target's own: kl to the original model, or cross-entropy of the text; auto: kl "
        "if the target wrote all of it",
    )
    group.add_argument(
        "--heads-weight",
        type=at_least_zero,
        metavar="X",
        help="lambda_0, the heads' loss beside the target's (0.01 with kl, else 0.2)",
    )
    group.add_argument(
        "--growth",
        choices=("sine", "linear", "constant"),
        default="sine",
        help="how lambda_0 gets there (sine)",
    )
    group.add_argument(
        "--growth-share", type=at_least_zero, default=1.0, help="in this share of the steps (1)"
    )
    group.add_argument(
        "--backbone-rate", type=at_least_zero, default=5e-4, help="learning rate's peak (5e-4)"
    )
    group.add_argument(
        "--heads-rate", type=at_least_zero, default=4.0, help="times that, for the heads (4)"
    )
    group.add_argument("--joint-epochs", type=positive, default=1, help="(1)")
    group.add_argument("--joint-steps", type=positive, metavar="N", help="at most")
    group.add_argument(
        "--joint-tokens", type=positive, default=8192, metavar="N", help="of text a step (8192)"
    )
    group.add_argument(
        "--pass-tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="of one pass of the target; fewer take less memory (4096)",
    )
    group.add_argument(
        "--checkpoint-layers",
        action="store_true",
        help="compute layers twice rather than keep what is in them",
    )
    group.add_argument(
        "--save",
        choices=("merged", "adapter"),
        default="merged",
        help="merged: a new target in OUTPUT/target (default); adapter: peft's in OUTPUT/adapter",
    )
    group.add_argument(
        "--max-kl",
        type=at_least_zero,
        default=0.05,
        metavar="NATS",
        help="a token, to the original, on held-out text; beyond it the new target counts as "
        "degraded, says so by its name, and the exit status is 1 (0.05)",
    )
    group.add_argument(
        "--max-perplexity-ratio",
        type=at_least_zero,
        default=1.05,
        metavar="X",
        help="after / before, likewise (1.05)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    train_medusa1.check(args)
    if args.heldout is None and not args.heldout_share:
        raise ValueError(
            "medusa-2 changes the target, so its quality has to be measured: give --heldout FILE, "
            "or a --heldout-share above 0."
        )
    for name in ("backbone_rate", "heads_rate"):
        if not getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is 0; use a number above 0.")
    if args.start_heads is not None:
        for name, unused in (
            ("lm_heads", "shared"),
            ("draft_vocab", None),
            ("cache", None),
            ("cache_dtype", "auto"),
        ):
            if getattr(args, name) != unused:
                raise ValueError(
                    f"--{name.replace('_', '-')} is of new heads and their warm-up, and "
                    "--start-heads brings trained ones. Leave one of the two out."
                )
    bounds_of(args)


def train(args: argparse.Namespace, inputs: Inputs, workers: Workers, console: Console) -> int:
    """Train heads alone, then with the target; returns the exit status."""
    from vllm_medusa.heads.checkpoint import peek_heads
    from vllm_medusa.training import machine
    from vllm_medusa.training.inputs import require_labels
    from vllm_medusa.training.medusa2_result import clear_results
    from vllm_medusa.training.state import TrainingRun
    from vllm_medusa.training.texts import Texts

    if args.start_heads is not None:
        info = peek_heads(args.start_heads)
        args.num_heads, args.num_layers = info.num_heads, info.num_layers
    texts, heldout = Texts.of(inputs.train), Texts.of(inputs.heldout)
    require_labels(texts, args.num_heads, str(args.data))
    require_labels(heldout, args.num_heads, f"held-out records of {args.heldout or args.data}")
    dtype = machine.target_dtype(args.dtype, inputs.dtype, workers.device)
    machine.require_gradients(dtype)
    _require_room(args, heldout.num_rows * inputs.fingerprint["hidden_size"] * dtype.itemsize)
    warm_up = train_medusa1.recipe_of(args, workers, inputs, texts)
    joint = _joint_recipe(args, inputs, warm_up)
    kept = train_medusa1.cache_dtype(args, dtype)
    settings = train_medusa1.settings_of(args, inputs, warm_up, str(dtype), str(kept))
    settings |= {
        "start_heads": _fingerprint(args.start_heads),
        "joint": joint.to_dict(),
        "save": args.save,
        "bounds": {"max_kl": args.max_kl, "max_perplexity_ratio": args.max_perplexity_ratio},
    }
    with TrainingRun(args.output, settings, overwrite=args.overwrite, main=workers.main) as run:
        if run.complete:
            console.print(f"nothing to do; the heads are in {args.output}", soft_wrap=True)
            return _verdict(args.output, console)
        if workers.main:
            clear_results(args.output)  # of a run that --overwrite throws away
        job = Medusa2Job(args, inputs, workers, console, run, settings, dtype)
        job.measure_original(heldout)
        if not (run.work / "state.pt").exists():
            job.warm_up(texts, warm_up)
        job.train_jointly(joint)
        workers.wait()
        if workers.main:
            job.publish()
            run.finish()
        workers.wait()
    return _verdict(args.output, console)


def _require_room(args: argparse.Namespace, needed: int) -> None:
    """Refuse held-out states of ``needed`` bytes that --cache-gb has no room for."""
    if needed > args.cache_gb * 1e9:
        raise ValueError(
            f"the original's hidden states on held-out text take {needed / 1e9:.3g} GB, all of "
            f"which have to be kept, and --cache-gb is {args.cache_gb:g}. Raise it, or hold out "
            "less text."
        )


def _joint_recipe(args: argparse.Namespace, inputs: Inputs, warm_up: Recipe) -> JointRecipe:
    from vllm_medusa.training.joint_recipe import JointRecipe
    from vllm_medusa.training.lora import LoraSettings
    from vllm_medusa.training.medusa2_schedule import (
        PEAK_OTHER,
        PEAK_SELF_DISTILLED,
        HeadsWeight,
    )
    from vllm_medusa.training.optimisation import Optimisation

    own = all(record.temperature is not None for record in inputs.train)
    lm_loss = args.lm_loss if args.lm_loss != "auto" else ("kl" if own else "cross-entropy")
    peak = args.heads_weight
    if peak is None:
        peak = PEAK_SELF_DISTILLED if lm_loss == "kl" else PEAK_OTHER
    default, given = JointRecipe(), args.warmup_steps
    return JointRecipe(
        lora=LoraSettings(
            args.lora_rank, args.lora_alpha, args.lora_dropout, tuple(args.lora_modules)
        ),
        heads_weight=HeadsWeight(peak, args.growth, args.growth_share),
        heads_rate=args.heads_rate,
        lm_loss=lm_loss,
        labels=args.labels,
        decay=args.decay,
        epochs=args.joint_epochs,
        steps=args.joint_steps,
        step_tokens=args.joint_tokens,
        pass_tokens=args.pass_tokens,
        checkpointing=args.checkpoint_layers,
        bf16=warm_up.bf16,
        optimisation=Optimisation(
            learning_rate=args.backbone_rate,
            warmup_steps=default.optimisation.warmup_steps if given is None else given,
            weight_decay=args.weight_decay,
            clip=args.clip,
        ),
        seed=args.seed,
        measure_every=args.measure_every,
    )


def _fingerprint(heads: Path | None) -> str | None:
    from vllm_medusa.offline.results import fingerprint

    if heads is None:
        return None
    if not heads.exists():
        raise ValueError(f"--start-heads {heads}: no such file or folder.")
    return fingerprint(heads)


def _verdict(output: Path, console: Console) -> int:
    """Say how the finished run fared; its exit status."""
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    training = config["medusa"]["training"]
    if quality := training.get("quality"):

        def shown(name: str, form: str) -> str:
            return "not finite" if quality[name] is None else format(quality[name], form)

        table = Table(title=f"the new target, merged, on {quality['num_tokens']} held-out tokens")
        for name in ("", "value", "allowed"):
            table.add_column(name, justify="left" if not name else "right")
        bounds = training["bounds"]
        for name, value, allowed in (
            ("KL(original || new), nats a token", shown("kl", ".4g"), f"{bounds['max_kl']:g}"),
            ("KL(new || original)", shown("reverse_kl", ".4g"), ""),
            ("same likeliest token", shown("top1_agreement", ".2%"), ""),
            ("perplexity before", shown("perplexity_before", ".4f"), ""),
            ("perplexity after", shown("perplexity_after", ".4f"), ""),
            (
                "after / before",
                shown("perplexity_ratio", ".4f"),
                f"{bounds['max_perplexity_ratio']:g}",
            ),
        ):
            table.add_row(name, value, allowed)
        console.print(table)
    where = "adapter" if training["save"] == "adapter" else "target"
    if not training["degraded"]:
        console.print(f"new target: {output / where}; heads: {output}", soft_wrap=True)
        return 0
    where = where if where == "adapter" else "target-degraded"
    console.print(
        f"[bold red]degraded:[/] {escape('; '.join(training['shortfalls']))}. The model is kept in "
        f"{output / where}, its heads in {output}. Use them only if you accept that; else train "
        "with a smaller --heads-weight or --backbone-rate, or on more text.",
        soft_wrap=True,
    )
    return 1
