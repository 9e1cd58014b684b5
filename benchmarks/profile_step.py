"""Where a decode step goes: target forward, heads, verification, compaction, vLLM itself.

    python -m benchmarks.profile_step BIG/target BIG/heads --tree BIG/tree.json --nodes 10

Plain vLLM, our tree and vLLM's own Medusa chain, each in a process of its own, one after another.
What a tree costs comes in two parts: the *own overhead*, work that plain decoding does not have
(heads, verification, compaction, bookkeeping of trees), and the forward pass over several rows
instead of one, which is reported against plain's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arms import PLAIN, Arm, ArmProcess, Machine, our_arms, vllm_arms
from benchmarks.prompts import load_prompts
from benchmarks.report import ROOT, describe_machine, mode_name, write_json
from benchmarks.spans import OWN

FORWARD = ("forward without attention", "attention", "LM head")


def average_parts(steps: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Mean milliseconds of each part over the middle half, by duration, of the decode steps.

    The middle half, because a stall of the machine would otherwise be blamed on whatever part it
    hit; a mean, because then the parts add up to the step.
    """
    decode = sorted((s for s in steps if s[2] and not s[3]), key=lambda step: step[0])
    middle = decode[len(decode) // 4 : max(1, 3 * len(decode) // 4)]
    labels = {label for step in middle for label in step[4]}
    return {
        label: 1e3 * sum(step[4].get(label, 0.0) for step in middle) / len(middle)
        for label in labels
    }


def summarise(parts: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """Totals in milliseconds and shares of the step."""
    step = sum(parts.values())
    own = sum(parts.get(label, 0.0) for label in OWN)
    forward = sum(parts.get(label, 0.0) for label in FORWARD)
    plain_forward = sum(plain.get(label, 0.0) for label in FORWARD)
    rest, plain_rest = step - forward, sum(plain.values()) - plain_forward
    return {
        "step_ms": step,
        "target_forward_ms": forward,
        "target_forward_ratio": forward / plain_forward,
        "own_overhead_ms": own,
        "own_overhead_share": own / step,
        "beyond_plain_ms": rest - plain_rest,
        "beyond_plain_share": (rest - plain_rest) / step,
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """Parts by arm, in milliseconds, largest first."""
    labels = sorted(
        {label for parts in results.values() for label in parts},
        key=lambda label: -max(parts.get(label, 0.0) for parts in results.values()),
    )
    plain = results[PLAIN.name]
    lines = ["| ms per step | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for label in labels:
        mark = " (own)" if label in OWN else ""
        cells = [f"{parts[label]:.3f}" if label in parts else "-" for parts in results.values()]
        lines.append(f"| {label}{mark} | " + " | ".join(cells) + " |")
    sums = {name: summarise(parts, plain) for name, parts in results.items()}
    for key, scale, unit in (
        ("step_ms", 1, ""),
        ("target_forward_ms", 1, ""),
        ("target_forward_ratio", 1, " x"),
        ("own_overhead_share", 100, " %"),
        ("beyond_plain_share", 100, " %"),
    ):
        cells = [f"**{scale * sums[name][key]:.2f}{unit}**" for name in results]
        lines.append(f"| {key.removesuffix('_ms').replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--tree", type=Path, help="JSON of `vllm-medusa tree --output`, or paths")
    parser.add_argument("--nodes", type=int, nargs="+", default=[10], help="draft nodes to cut to")
    parser.add_argument("--chain-depths", type=int, nargs="*", default=[])
    parser.add_argument("--stock-depths", type=int, nargs="*", default=[5])
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "demo" / "prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="core ids")
    parser.add_argument("--openmp", choices=["iomp", "gomp"], default="iomp")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "profile")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "speed-logs")
    return parser.parse_args()


def main() -> int:
    """Profiles every arm and writes JSON and Markdown."""
    from transformers import AutoTokenizer

    arguments = parse()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    prompts = load_prompts(arguments.prompt_file, tokenizer, 0, arguments.prompts, 384)
    tree = json.loads(arguments.tree.read_text()) if arguments.tree else []
    tree = tree["tree"] if isinstance(tree, dict) else tree
    heads = str(arguments.heads.absolute())
    arms: list[Arm] = [PLAIN, *our_arms(heads, arguments.chain_depths, tree, arguments.nodes)]
    arms += vllm_arms(heads, arguments.stock_depths, [])
    settings = {
        "model": str(arguments.target.absolute()),
        "dtype": arguments.dtype,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "enforce_eager": arguments.eager,
        "seed": 0,
    }
    machine = Machine(tuple(arguments.cores), arguments.openmp)
    document: dict[str, Any] = {"machine": describe_machine(), "parts_ms": {}, "summary": {}}
    results: dict[float, dict[str, dict[str, float]]] = {t: {} for t in arguments.temperatures}
    for arm in tqdm(arms, desc="arms", unit="arm"):
        log = arguments.logs / f"profile-{arm.name.replace(' ', '-')}.log"
        with ArmProcess(arm, settings, machine, log) as process:
            for temperature in arguments.temperatures:
                run = {"prompts": prompts, "temperature": temperature, "batch": 1}
                run["max_tokens"] = arguments.max_tokens
                process.ask("run", **run)  # warms up
                steps = process.ask("profile", **run)["steps"]
                results[temperature][arm.name] = average_parts(steps)
    text = []
    for temperature, parts in results.items():
        name = mode_name(temperature)
        document["parts_ms"][name] = parts
        document["summary"][name] = {
            arm: summarise(values, parts[PLAIN.name]) for arm, values in parts.items()
        }
        text.append(f"**{name}**\n\n{table(parts)}\n")
    write_json(arguments.output.with_suffix(".json"), document)
    arguments.output.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
