"""Test random engines and requests for some minutes, or repeat those of given seeds.

python -m support.fuzz --minutes 10 [--first ENGINE] [--runner v1|v2|both]
python -m support.fuzz --engine 12 [--requests 12001,12017] [--runner v2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUND = {"v1": 100, "v2": 8}  # requests per engine
V2_SHARE = 0.2  # share of the minutes


def main() -> int:
    """Returns 1 if anything differed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--first", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--engine", type=int)
    parser.add_argument("--requests", default="")
    parser.add_argument("--runner", choices=("v1", "v2", "both"))
    args = parser.parse_args()
    runner = args.runner or ("v1" if args.engine is not None else "both")
    if runner == "both":
        return _both(args)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    import conftest  # noqa: F401  (settings that vLLM reads when it is imported)

    if runner == "v2":
        from support import triton_on_cpu

        triton_on_cpu.prepare()
    from support.fuzz.cases import PER_ENGINE, engine_case, request_case
    from support.fuzz.comparing import fuzz_round, reproduction
    from support.fuzz.running import Models

    begun, engine, wrong = time.monotonic(), args.first, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        models = Models(Path(folder))
        while args.engine is not None or time.monotonic() < begun + 60 * args.minutes:
            engine = engine if args.engine is None else args.engine
            seeds = [PER_ENGINE * engine + i for i in range(ROUND[runner])]
            if args.requests:
                seeds = [int(seed) for seed in args.requests.split(",")]
                print(engine_case(engine), *map(request_case, seeds[:4]), sep="\n")
            found = fuzz_round(models, engine, seeds)
            print(
                f"{runner} engine {engine}, {time.monotonic() - begun:.0f} s: "
                f"{found.requests} requests, {found.run.preemptions} preemptions, "
                f"{found.run.accepted} drafts accepted; {found.refused} refused by both, "
                f"{len(found.unsteady)} with two answers from plain vLLM, "
                f"{len(found.wrong)} differ",
                flush=True,
            )
            if found.wrong or found.run.problem:
                wrong += 1
                for seed, text in found.wrong.items():
                    print(f"  request {seed}: {text}")
                print(f"  {found.run.problem}\n  {reproduction(engine, seeds)}", flush=True)
            if args.engine is not None:
                break
            engine += 1
    return int(wrong > 0)


def _both(args: argparse.Namespace) -> int:
    status = 0
    for runner, share in (("v1", 1 - V2_SHARE), ("v2", V2_SHARE)):
        command = [sys.executable, "-m", "support.fuzz", "--runner", runner]
        command += ["--minutes", str(share * args.minutes), "--first", str(args.first)]
        status |= subprocess.run(command, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
