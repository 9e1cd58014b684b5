"""Speed of tree Medusa against plain vLLM, vLLM's own Medusa chain and n-gram speculation.

    python -m benchmarks.enlarge demo/target BIG --heads demo/heads
    vllm-medusa tree HEADS --num-draft-tokens 63 --output BIG/tree.json  # demo/heads, calibrated
    python -m benchmarks.speed BIG/target BIG/heads --tree BIG/tree.json

Every arm takes turns with plain vLLM on the same prompts, so that what disturbs the machine
disturbs both; a ratio belongs to one such pair. Before any of it the arm's tokens are compared with
plain vLLM's, and an arm with wrong tokens gets no speed and makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arms import PLAIN, Arm, ArmProcess, Machine, our_arms, vllm_arms
from benchmarks.gate import Gate, compare
from benchmarks.measure import Comparison, Run
from benchmarks.prompts import load_prompts
from benchmarks.report import ROOT, describe_machine, markdown, mode_name, plot, write_json

TREE_SIZES = (4, 7, 10, 14, 22, 32, 63)
QUICK = {"prompts": 4, "max_tokens": 48, "repeats": 2, "only": "^(chain 3|tree (7|14)|vLLM.*)$"}


class Benchmark:
    """The prompts, plain vLLM's engine and its outputs, which every arm is compared with."""

    def __init__(
        self, plain: ArmProcess, prompts: list[list[int]], arguments: argparse.Namespace, vocab: int
    ) -> None:
        self.plain = plain
        self.prompts = prompts
        self.arguments = arguments
        self.vocab = vocab
        self.want = {t: self._run(plain, t)["outputs"] for t in arguments.temperatures}

    def measure(self, arm: ArmProcess, temperature: float) -> dict[str, Any]:
        """Checks and then times one arm at one temperature."""
        outputs = self._run(arm, temperature)["outputs"]  # also warms every shape up
        gate = self._gate(arm.arm, temperature, outputs)
        row = {
            "arm": arm.arm.name,
            "kind": arm.arm.kind,
            "num_draft_tokens": arm.arm.num_draft_tokens,
            "temperature": temperature,
            "gate": gate.to_dict(),
            "startup": arm.startup,
        }
        if not gate.green:
            return row
        plain_runs, arm_runs = [], []
        name = f"{arm.arm.name}, {mode_name(temperature)}"
        for _ in tqdm(range(self.arguments.repeats), desc=name, unit="pair"):
            plain_runs.append(Run.of(self._run(self.plain, temperature)["steps"]))
            arm_runs.append(Run.of(self._run(arm, temperature)["steps"]))
        return row | Comparison(tuple(plain_runs), tuple(arm_runs)).summary()

    def _run(self, process: ArmProcess, temperature: float) -> dict[str, Any]:
        return process.ask(
            "run",
            prompts=self.prompts,
            temperature=temperature,
            max_tokens=self.arguments.max_tokens,
            batch=self.arguments.batch,
        )

    def _gate(self, arm: Arm, temperature: float, outputs: list[list[int]]) -> Gate:
        if temperature > 0 and not arm.keeps_seeds:
            return Gate(len(self.prompts), (), checked=False)
        want = self.want[temperature]
        return compare(
            self.prompts,
            want,
            outputs,
            temperature,
            self.vocab,
            lambda rows: self.plain.ask("score", rows=rows),
        )


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--tree", type=Path, help="JSON of `vllm-medusa tree --output`, or paths")
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "demo" / "prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-prompt-tokens", type=int, default=384)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--repeats", type=int, default=3, help="pairs per arm and temperature")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cores", type=int, nargs="+", default=[0, 1], help="core ids")
    parser.add_argument("--openmp", choices=["iomp", "gomp"], default="iomp")
    parser.add_argument("--multiprocessing", action="store_true", help="vLLM's engine-core process")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--chain-depths", type=int, nargs="*", default=[2, 3, 4, 5])
    parser.add_argument("--tree-sizes", type=int, nargs="*", default=list(TREE_SIZES))
    parser.add_argument("--stock-depths", type=int, nargs="*", default=[2, 5])
    parser.add_argument("--ngrams", type=int, nargs="*", default=[5])
    parser.add_argument("--only", help="regular expression of the arms' names")
    parser.add_argument("--minutes", type=float, help="start no further arm after this long")
    parser.add_argument("--quick", action="store_true", help=f"few minutes: {QUICK}")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "speed")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "speed-logs")
    given = parser.parse_args()
    if given.quick:
        asked = {key for key in QUICK if f"--{key.replace('_', '-')}" in sys.argv}
        vars(given).update({key: value for key, value in QUICK.items() if key not in asked})
    return given


def choose_arms(arguments: argparse.Namespace) -> tuple[list[Arm], list[list[int]]]:
    """The arms to run and the best-first tree they are cut from."""
    tree: list[list[int]] = []
    if arguments.tree is not None:
        document = json.loads(arguments.tree.read_text())
        tree = document["tree"] if isinstance(document, dict) else document
    heads = str(arguments.heads.absolute())
    arms = our_arms(heads, arguments.chain_depths, tree, arguments.tree_sizes)
    arms += vllm_arms(heads, arguments.stock_depths, arguments.ngrams)
    return [arm for arm in arms if re.search(arguments.only or "", arm.name)], tree


def setting_of(arguments: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """What the report says about how it was measured; no paths of this machine."""
    from safetensors import safe_open

    parameters = 0
    for path in arguments.target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                parameters += size
    keys = ("dtype", "batch", "max_tokens", "repeats", "temperatures", "openmp", "multiprocessing")
    return {key: getattr(arguments, key) for key in keys} | {
        "target_parameters": parameters,
        "cores": len(arguments.cores),
        "compiled": not arguments.eager,
        "prompt_file": arguments.prompt_file.name,
        "prompts": num_prompts,
        "max_prompt_tokens": arguments.max_prompt_tokens,
    }


def main() -> int:
    """Runs the benchmark; 1 if an arm's tokens were wrong."""
    from transformers import AutoTokenizer

    arguments = parse()
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    prompts = load_prompts(
        arguments.prompt_file, tokenizer, 0, arguments.prompts, arguments.max_prompt_tokens
    )
    arms, tree = choose_arms(arguments)
    max_model_len = arguments.max_prompt_tokens + arguments.max_tokens + 32
    settings = {
        "model": str(arguments.target.absolute()),
        "dtype": arguments.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max(8, arguments.batch),
        # prompts are never split (vLLM on CPU can't chunk seeded ones), trees always fit
        "max_num_batched_tokens": max(max_model_len, 64) * max(8, arguments.batch),
        "enable_prefix_caching": False,  # the same prompts come again and again
        "enforce_eager": arguments.eager,
        "seed": 0,
    }
    machine = Machine(tuple(arguments.cores), arguments.openmp, arguments.multiprocessing)
    document: dict[str, Any] = {
        "command": "python -m benchmarks.speed "
        + " ".join(Path(a).name if "/" in a else a for a in sys.argv[1:]),
        "machine": describe_machine(),
        "setting": setting_of(arguments, len(prompts)),
        "tree": tree,
        "rows": [],
    }
    vocab = json.loads((arguments.target / "config.json").read_text())["vocab_size"]
    with ArmProcess(PLAIN, settings, machine, arguments.logs / "plain.log") as plain:
        benchmark = Benchmark(plain, prompts, arguments, vocab)
        for arm in tqdm(arms, desc="arms", unit="arm"):
            if arguments.minutes and time.monotonic() - started > 60 * arguments.minutes:
                tqdm.write(f"time is up: {arm.name} and what follows were not measured")
                break
            log = arguments.logs / f"{arm.name.replace(' ', '-')}.log"
            with ArmProcess(arm, settings, machine, log) as process:
                for temperature in arguments.temperatures:
                    document["rows"].append(benchmark.measure(process, temperature))
            write_json(arguments.output.with_suffix(".json"), document)
    text = markdown(document)
    arguments.output.with_suffix(".md").write_text(text)
    plot(document, arguments.output.with_suffix(".png"))
    print(text)
    return 0 if all(row["gate"]["green"] for row in document["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
