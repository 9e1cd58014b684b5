"""Random engines and requests for some minutes, or those of given seeds once more.

python -m support.fuzz --minutes 10 [--first ENGINE] [--runner v1|v2|both]
python -m support.fuzz --engine 12 --requests 1201,1217 [--runner v2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUND = {"v1": 100, "v2": 8}  # requests of an engine
V2_SHARE = 0.2  # of the minutes


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
    _prepare(runner)
    from support.fuzz.comparing import fuzz_round, reproduction
    from support.fuzz.running import Models

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        models = Models.save(Path(folder))
        if args.engine is not None:
            return _again(args, models, runner)
        end, engine, begun = time.monotonic() + 60 * args.minutes, args.first, time.monotonic()
        requests = preemptions = unsteady = wrong = accepted = refused = 0
        while time.monotonic() < end:
            seeds = _seeds(engine, runner)
            found = fuzz_round(models, engine, seeds)
            requests += found.requests
            preemptions += found.run.preemptions
            accepted += found.run.accepted
            unsteady += len(found.unsteady)
            refused += found.refused
            wrong += len(found.wrong) + bool(found.run.problem)
            print(
                f"{runner} engine {engine}, {time.monotonic() - begun:.0f} s: {requests} requests, "
                f"{preemptions} preemptions, {accepted} drafts accepted; "
                f"{refused} refused by both, "
                f"{unsteady} that plain vLLM answers in two ways, {wrong} differ",
                flush=True,
            )
            if found.wrong or found.run.problem:
                _tell(found)
                print("  " + reproduction(engine, found.together or seeds), flush=True)
            engine += 1
    return int(wrong > 0)


def _seeds(engine: int, runner: str) -> list[int]:
    from support.fuzz.cases import PER_ENGINE

    return [PER_ENGINE * engine + i for i in range(ROUND[runner])]


def _tell(found: object) -> None:
    for seed, text in found.wrong.items():  # type: ignore[attr-defined]
        print(f"  request {seed}: {text}")
    if found.run.problem:  # type: ignore[attr-defined]
        print(f"  {found.run.problem}")  # type: ignore[attr-defined]


def _again(args: argparse.Namespace, models: object, runner: str) -> int:
    from support.fuzz.cases import engine_case, request_case
    from support.fuzz.comparing import fuzz_round

    seeds = [int(seed) for seed in args.requests.split(",") if seed] or _seeds(args.engine, runner)
    print(engine_case(args.engine))
    for seed in seeds[:4]:
        case = request_case(seed)
        print(case, case.sampling())
    found = fuzz_round(models, args.engine, seeds, shrink=False)  # type: ignore[arg-type]
    print(f"{found.requests} requests, {found.run.preemptions} preemptions", end="; ")
    print(f"plain vLLM answers in two ways: {found.unsteady}")
    _tell(found)
    return int(bool(found.wrong or found.run.problem))


def _both(args: argparse.Namespace) -> int:
    status = 0
    for runner, share in (("v1", 1 - V2_SHARE), ("v2", V2_SHARE)):
        command = [sys.executable, "-m", "support.fuzz", "--runner", runner]
        command += ["--minutes", str(share * args.minutes), "--first", str(args.first)]
        status |= subprocess.run(command, check=False).returncode
    return status


def _prepare(runner: str) -> None:
    """Before vLLM is imported: what `conftest` sets, and Triton's interpreter for V2."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    if runner == "v2":
        import conftest

        from support import triton_on_cpu

        triton_on_cpu.prepare()
    else:
        import conftest  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
