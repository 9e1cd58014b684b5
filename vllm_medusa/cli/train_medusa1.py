"""The method ``medusa-1`` of `vllm-medusa train`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_medusa.cli.generate import at_least_zero
from vllm_medusa.cli.train_progress import StepProgress, accuracy_table, line_of

if TYPE_CHECKING:
    import torch

    from vllm_medusa.heads.model import MedusaHeads
    from vllm_medusa.training.hidden_cache import HiddenStates
    from vllm_medusa.training.inputs import Inputs
    from vllm_medusa.training.medusa1 import Medusa1, Recipe
    from vllm_medusa.training.state import TrainingRun
    from vllm_medusa.training.target import Target
    from vllm_medusa.training.texts import Texts
    from vllm_medusa.training.workers import Workers


CACHE_KEY = ("target", "target_config", "dtype", "quantization")  # hidden states depend on these


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this method has."""
    group = parser.add_argument_group("medusa-1: the target's hidden states are computed once")
    group.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="where they are kept (in the output)"
    )
    group.add_argument(
        "--cache-gb",
        type=at_least_zero,
        default=50.0,
        metavar="GB",
        help="at most, of what is held out first; states beyond are computed whenever they are "
        "needed, for a text's labels in one go, so the order of the steps depends on it (50)",
    )
    group.add_argument(
        "--cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the text to train on; auto: what the target computes in, so that nothing is lost, "
        "as what is held out for medusa-2 always is",
    )
    group.add_argument("--keep-cache", action="store_true", help="for another run on these texts")


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if args.keep_cache and args.cache is None:
        raise ValueError("--keep-cache needs --cache FOLDER: the output's own is only for one run.")


def train(args: argparse.Namespace, inputs: Inputs, workers: Workers, console: Console) -> int:
    """Train heads on the frozen target; returns the exit status."""
    from vllm_medusa.training import machine
    from vllm_medusa.training.hidden_cache import HiddenStates
    from vllm_medusa.training.inputs import require_labels
    from vllm_medusa.training.medusa1 import Medusa1
    from vllm_medusa.training.state import TrainingRun
    from vllm_medusa.training.target import Target
    from vllm_medusa.training.texts import Texts

    texts = Texts.of(inputs.train)
    require_labels(texts, args.num_heads, str(args.data))
    heldout = Texts.of(inputs.heldout) if inputs.heldout else None
    if heldout is not None:
        require_labels(heldout, args.num_heads, f"held-out records of {args.heldout or args.data}")
    dtype = machine.target_dtype(args.dtype, inputs.dtype, workers.device)
    kept = cache_dtype(args, dtype)
    recipe = recipe_of(args, workers, inputs, texts)
    settings = settings_of(args, inputs, recipe, str(dtype), str(kept))
    with TrainingRun(args.output, settings, overwrite=args.overwrite, main=workers.main) as run:
        if run.complete:
            console.print(f"nothing to do; the heads are in {args.output}", soft_wrap=True)
            return 0
        origin = origin_of(args) if workers.main else {}
        target = Target.load(
            inputs.source, dtype=dtype, device=workers.device, quantization=args.quantization
        )
        key = {name: settings[name] for name in CACHE_KEY}
        bytes_left, sources = int(args.cache_gb * 1e9), []
        for part, file in ((heldout, args.heldout or args.data), (texts, args.data)):
            if part is None:
                continue
            folder = args.cache or run.work
            states = HiddenStates(
                target, part, folder, key, dtype=kept, max_bytes=bytes_left, file=file
            )
            bytes_left -= states.cached_bytes
            sources.append(states)
        build_states(sources, workers, console)
        heads = make_heads(args, inputs, target)
        measured = sources[0] if heldout is not None else None
        trainer = Medusa1(target, heads, sources[-1], measured, recipe, run, workers)
        with StepProgress(console, "training", trainer.steps) as bar:
            trainer.train(lambda step, _, entry: bar.show(step, line_of(entry)))
        _save(args, inputs, settings, origin, trainer, run, console)
        for states in sources:
            states.release()
        workers.wait()
        if workers.main:
            for states in sources:
                if not args.keep_cache:
                    states.remove()
            run.finish()
    return 0


def cache_dtype(args: argparse.Namespace, dtype: torch.dtype) -> torch.dtype:
    """What the states of the text to train on are kept in; the target computes in ``dtype``."""
    from vllm_medusa.training.hidden_cache import DTYPES

    return dtype if args.cache_dtype == "auto" else DTYPES[args.cache_dtype]


def recipe_of(args: argparse.Namespace, workers: Workers, inputs: Inputs, texts: Texts) -> Recipe:
    """How the heads are trained alone; what isn't given follows from the target and the texts."""
    from vllm_medusa.training import machine
    from vllm_medusa.training.medusa1 import Recipe, usual_batch, usual_rate
    from vllm_medusa.training.optimisation import Optimisation

    epochs = args.epochs or Recipe.epochs
    given = args.warmup_steps
    warmup = Optimisation.warmup_steps if given is None else given
    return Recipe(
        labels=args.labels,
        decay=args.decay,
        epochs=epochs,
        batch_rows=args.batch_tokens or usual_batch(texts.num_labels * epochs),
        accumulate=args.accumulate,
        bf16=machine.use_bf16(args.precision, workers.device),
        optimisation=Optimisation(
            learning_rate=args.learning_rate or usual_rate(inputs.fingerprint["hidden_size"]),
            warmup_steps=warmup,
            weight_decay=args.weight_decay,
            clip=args.clip,
        ),
        seed=args.seed,
        measure_every=args.measure_every,
    )


def settings_of(
    args: argparse.Namespace,
    inputs: Inputs,
    recipe: Recipe,
    dtype: str,
    kept: str,
) -> dict[str, Any]:
    """Everything that the heads depend on; ``kept`` is the cache's dtype."""
    from vllm_medusa.offline.records import digest_of

    return {
        "method": args.method,
        "target": inputs.fingerprint,
        "target_config": inputs.config,
        "data": {
            "train": digest_of(inputs.train),
            "heldout": digest_of(inputs.heldout) if inputs.heldout else None,
        },
        "heads": {
            name: getattr(args, name)
            for name in ("num_heads", "num_layers", "lm_heads", "draft_vocab", "save_dtype")
        },
        "recipe": recipe.to_dict(),
        "dtype": dtype,
        "quantization": args.quantization,
        "cache": {"dtype": kept, "gb": args.cache_gb},
    }


def origin_of(args: argparse.Namespace) -> dict[str, Any]:
    """The heads' provenance; taken before training, since its files may be moved meanwhile."""
    from vllm_medusa.heads.provenance import provenance

    files = [path for path in (args.data, args.heldout) if path is not None]
    return provenance(["vllm-medusa", *sys.argv[1:]], files)


def build_states(sources: list[HiddenStates], workers: Workers, console: Console) -> None:
    """Compute the states that lack, after a look at the disk."""
    if workers.main:
        others = 0
        for states in sources:
            states.check_space(others)
            others += states.missing_bytes
    workers.wait()
    for states in sources:
        with StepProgress(console, "hidden states") as bar:
            states.build(
                lambda ready, total, bar=bar: bar.show(ready, "", total=total),  # type: ignore[misc]
                rank=workers.rank,
                world=workers.world,
            )
    workers.wait()
    kept, needed = (sum(getattr(s, f"{n}_bytes") for s in sources) for n in ("cached", "needed"))
    if kept < needed:
        console.print(
            f"{kept / 1e9:.2f} of {needed / 1e9:.2f} GB of hidden states are kept; the rest is "
            "computed in every epoch"
        )


def make_heads(args: argparse.Namespace, inputs: Inputs, target: Target) -> MedusaHeads:
    """Heads as the options want them, untrained."""
    from vllm_medusa.training.initial_heads import frequent_tokens, new_heads

    token_map = None
    if args.draft_vocab is not None and args.draft_vocab < target.vocab_size:
        token_map = frequent_tokens(inputs.train, args.draft_vocab, target.vocab_size)
    return new_heads(
        target, args.num_heads, args.num_layers, lm_heads=args.lm_heads, token_map=token_map
    )


def _save(
    args: argparse.Namespace,
    inputs: Inputs,
    settings: dict[str, Any],
    origin: dict[str, Any],
    trainer: Medusa1,
    run: TrainingRun,
    console: Console,
) -> None:
    """Round the heads to what is stored, measure that, draw the curves, write everything."""
    from vllm_medusa.training.curves import draw_curves
    from vllm_medusa.training.export import round_to, save_trained
    from vllm_medusa.training.hidden_cache import DTYPES

    dtype = DTYPES[args.save_dtype]
    round_to(trainer.heads, dtype)
    heldout = None if trainer.heldout is None else trainer.measure()
    if not run.main:
        return
    if heldout is not None:
        run.log({"step": trainer.step, "heldout": heldout})
        console.print(accuracy_table(heldout))
    draw_curves(run.entries(), run.folder / "curves.png", f"Medusa-1 on {inputs.source}")
    save_trained(
        args.output,
        trainer.heads,
        inputs.source,
        dtype=dtype,
        training={**settings, "steps": trainer.steps, "heldout": heldout},
        target=inputs.fingerprint,
        provenance=origin,
    )
    console.print(f"heads in {args.output}", soft_wrap=True)
