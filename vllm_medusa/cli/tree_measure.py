"""`vllm-medusa tree --measure`: the tree on other prompts, decoded for real."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_medusa.cli.generate import at_least_zero, positive
from vllm_medusa.cli.measuring import add_machine, end_tokens, machine, position_bar

if TYPE_CHECKING:
    from vllm_medusa.calibration.measured import Measured
    from vllm_medusa.calibration.observations import Observations


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of measuring."""
    group = parser.add_argument_group("measuring (the tree, by decoding other prompts)")
    group.add_argument(
        "--measure", type=Path, metavar="FILE", help="prompts, or records whose prompts are used"
    )
    group.add_argument("--target", dest="model", help="the target: a folder or a hub name")
    group.add_argument(
        "--sizes", type=positive, nargs="+", metavar="N", help="draft nodes to measure; absent: all"
    )
    group.add_argument("--max-tokens", type=positive, default=128, help="of each text (128)")
    group.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    group.add_argument("--samples", type=positive, default=1, help="texts of each prompt (1)")
    group.add_argument(
        "--temperature", type=at_least_zero, help="absent: the calibration's; 0: greedy"
    )
    group.add_argument("--seed", type=int, default=0, help="text i uses the seed SEED + i (0)")
    add_machine(group)


def read_prompts(args: argparse.Namespace, observations: Observations) -> list[list[int]]:
    """Token ids to decode from; none without --measure.

    Sets ``args.temperature`` where the calibration says it.
    """
    if not args.measure:
        if args.sizes:
            raise ValueError("--sizes says what to measure; give --measure PROMPTS too.")
        return []
    if not args.model:
        raise ValueError(f"--measure {args.measure} needs the target: --target MODEL.")
    if args.temperature is None:
        args.temperature = observations.temperature()
    if args.temperature is None:
        raise ValueError(
            "the calibration's texts don't say at which temperature the target wrote them; say how "
            "to decode with --temperature."
        )
    from transformers import AutoTokenizer

    from vllm_medusa.calibration.prompts import prompt_ids

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return prompt_ids(args.measure, tokenizer, args.limit)


def measure_tree(
    args: argparse.Namespace,
    console: Console,
    paths: Sequence[tuple[int, ...]],
    prompts: list[list[int]],
) -> dict[int, Measured]:
    """Tokens per step of real decoding, for every size asked for."""
    from vllm_medusa.calibration.measure import measure
    from vllm_medusa.heads import load_heads
    from vllm_medusa.training.target import Target
    from vllm_medusa.tree.topology import TokenTree

    device, dtype = machine(args)
    target = Target.load(args.model, dtype=dtype, device=device, quantization=args.quantization)
    heads, _ = load_heads(
        args.heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=target.device,
    )
    sizes = sorted({min(size, len(paths)) for size in args.sizes or [len(paths)]})
    total = len(sizes) * len(prompts) * args.samples
    found = {}
    with position_bar(console, total) as bar:
        task = bar.add_task("texts", total=total)
        for size in sizes:
            found[size] = measure(
                target.model,
                heads,
                TokenTree.from_paths(paths[:size]),
                prompts,
                max_new_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=args.seed,
                samples=args.samples,
                end_tokens=end_tokens(target),
                progress=lambda count: bar.advance(task, count),
            )
    return found
