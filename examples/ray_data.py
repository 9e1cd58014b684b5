"""An offline job on a Ray cluster with Ray Data's vLLM processor; each replica loads the heads.

    pip install 'vllm-medusa[cpu,ray]'
    python examples/ray_data.py TARGET HEADS --prompts prompts.jsonl --output results --replicas 2

Without `--address`, a local cluster is started. On machines without GPUs, `--cpus N` sets the
number of cores that Ray reserves for each replica. Results are JSON lines in the folder, in any
order, identified by `id`. A replica that dies is restarted, and its prompts are run again. If the
job is interrupted, the same command resumes: prompts that have a result are skipped. Results do not
include acceptance, because Ray's processor does not return it. With `--records` the lines are
training records as written by `vllm-medusa distill` (for `train`: `cat results/*.json`).
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
    """The `id` of every complete line in the folder; a killed job may leave an incomplete one."""
    found = set()
    for file in folder.glob("*.json"):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                found.add(json.loads(line)["id"])
            except ValueError:
                print(f"{file}: an incomplete line is skipped: {line[:40]}", file=sys.stderr)
    return found


def result(row: dict[str, Any], *, records: bool) -> dict[str, Any]:
    """An output line; a record has the prompt's tokens followed by the generated ones."""
    answer = list(row["generated_tokens"])
    if not records:
        return {"id": row["id"], "text": row["generated_text"], "token_ids": answer}
    token_ids = [*row["prompt_token_ids"], *answer]
    span = [len(token_ids) - len(answer), len(token_ids)]
    return {"id": row["id"], "token_ids": token_ids, "generated": [span]}


def main() -> None:
    """Generate for all prompts."""
    parser = argparse.ArgumentParser(description="Generate on a Ray cluster.")
    parser.add_argument("target")
    parser.add_argument("heads")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON lines with "id" and "prompt"'
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--replicas", type=int, default=1, help="max number of replicas")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=16, help="prompts per block of results")
    parser.add_argument("--address", help="address of a cluster (default: this machine)")
    parser.add_argument("--cpus", type=int, help="cores per replica, without GPUs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--records",
        action="store_true",
        help="write training records as `vllm-medusa distill` does, prompts included",
    )
    args = parser.parse_args()

    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # vLLM binds CPU workers to cores: all replicas of a machine to the same ones
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
