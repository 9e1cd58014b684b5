"""An offline job over a Ray cluster, by Ray Data's own vLLM processor; each replica has the heads.

    pip install 'vllm-medusa[cpu,ray]'
    python examples/ray_data.py TARGET HEADS --prompts prompts.jsonl --output results --replicas 2

Without `--address` a cluster of this machine is started. `--cpus N` is for machines without GPUs:
cores that Ray sets aside for each replica. Results are JSON lines in the folder, in any order; `id`
says whose they are. A replica that dies is started again, and its prompts are answered again. A job
that was stopped goes on by the same command: what the folder has answers to is left out. Acceptance
is not among the results, since Ray's processor does not pass it on from vLLM. With `--records` the
lines are such as `vllm-medusa distill` writes, for `train` (in one file: `cat results/*.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any


def answered(folder: Path) -> set[object]:
    """The `id` of every whole line in the folder; a killed job may leave one that is not."""
    found = set()
    for file in folder.glob("*.json"):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                found.add(json.loads(line)["id"])
            except ValueError:
                print(f"{file}: a line that is not whole is left out: {line[:40]}", file=sys.stderr)
    return found


def result(row: dict[str, Any], *, records: bool) -> dict[str, Any]:
    """A line of the output; a record is the prompt and behind it what the target wrote."""
    answer = list(row["generated_tokens"])
    if not records:
        return {"id": row["id"], "text": row["generated_text"], "token_ids": answer}
    token_ids = [*row["prompt_token_ids"], *answer]
    span = [len(token_ids) - len(answer), len(token_ids)]
    return {"id": row["id"], "token_ids": token_ids, "generated": [span]}


def main() -> None:
    """Answer every prompt."""
    parser = argparse.ArgumentParser(description="Generate over a Ray cluster.")
    parser.add_argument("target")
    parser.add_argument("heads")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON lines with "id" and "prompt"'
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--replicas", type=int, default=1, help="at most")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--batch", type=int, default=16, help="prompts whose answers are written together"
    )
    parser.add_argument("--address", help="of a cluster; absent: this machine")
    parser.add_argument("--cpus", type=int, help="of each replica, without GPUs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--records",
        action="store_true",
        help="write what `vllm-medusa train` reads, prompts included, as `distill` does",
    )
    args = parser.parse_args()

    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # CPU workers are bound to cores by vLLM, all replicas of a machine to the same ones
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(args.cpus)}
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    ray.init(args.address, runtime_env={"env_vars": {**kept, **(bound if args.cpus else {})}})

    options: dict[str, Any] = {}
    if args.cpus:
        options["placement_group_config"] = {"bundle_per_worker": {"CPU": args.cpus}}
    config = vLLMEngineProcessorConfig(
        model_source=args.target,
        engine_kwargs={
            "dtype": args.dtype,
            "speculative_config": {"method": "medusa", "model": str(Path(args.heads).resolve())},
            **({"kv_cache_memory_bytes": 1 << 28, "enforce_eager": True} if args.cpus else {}),
        },
        concurrency=args.replicas,
        batch_size=args.batch,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
        **options,
    )
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "sampling_params": sampling},
        postprocess=partial(result, records=args.records),
    )
    done = answered(args.output)
    prompts = ray.data.read_json(str(args.prompts), lines=True)
    left = prompts.filter(lambda row: row["id"] not in done)
    left = left.repartition(target_num_rows_per_block=args.batch)
    processor(left).write_json(str(args.output))


if __name__ == "__main__":
    main()
