"""What one NVIDIA GPU tells: are the kernels right there, how fast, what does a tree step cost.

    python -m benchmarks.gpu_check                       all parts, at most 8 minutes
    python -m benchmarks.gpu_check --parts attention kernels decode
    python -m benchmarks.gpu_check --parts speed --minutes 9 --output benchmarks/results/gpu
    python -m benchmarks.gpu_check --interpret           no GPU: a little of it in the interpreter

Needs torch and Triton and this repository. The parts, in their order:

    machine     what it is; copy bandwidth and matmul rate, from which floors are computed
    attention   paged tree attention against an fp64 reference, random shapes, CUDA graphs
    kernels     walk, paths, typical acceptance, proposal, compaction against their torch rules
    decode      propose, score, accept, compact, repeat: the text of plain decoding, in fp32
    step        a whole decode step of 7B- and 8B-shaped targets with 1, 16, 32 and 64 nodes
    speed       attention against the bandwidth floor and torch's own kernels
    tiles       would other tiles or parts have been faster
    vllm        plain against tree end to end, if vLLM is installed

Every part runs in processes of its own; a case that fails, crashes or hangs costs itself alone, and
what was found is on disk as soon as it is found. In ``--output``: gpu_check.json (all records,
tracebacks included), gpu_check.md, and gpu_check.png with matplotlib. Parts that an earlier run
measured on the same GPU and sources are kept, so parts can be run one by one. Without a GPU nothing
is written; with --interpret only where --output is given.

Exit status: 0 if all that ran was right, whatever its speed; 1 if a case was wrong or broke; 2 if
there is no GPU, when nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT
from benchmarks.gpu.cases import Record, plain
from benchmarks.gpu.child import PARTS, part_cases
from benchmarks.gpu.isolation import Limits, run_isolated
from benchmarks.gpu.machine import NO_GPU, describe_host
from benchmarks.gpu.report import markdown, plot
from benchmarks.gpu.verdicts import verdicts
from vllm_medusa.files import write_json

SCHEMA = 1
NEEDED = 10.0  # seconds that writing and ending take
STALL = 100.0  # seconds that a case may take
ORDER = ("attention", "kernels", "decode", "step", "speed", "tiles", "vllm")
SHARES = {  # of the time; what a part leaves goes to those behind it
    "attention": 0.25,
    "kernels": 0.08,
    "decode": 0.07,
    "step": 0.2,
    "speed": 0.28,
    "tiles": 0.1,
    "vllm": 0.02,
}
COMPILED_AHEAD = ("attention", "step", "speed", "tiles")
INTERPRETED = ("attention", "kernels", "decode")


class Check:
    """One run: its time, its document; ``logs`` is for files that nobody needs afterwards."""

    def __init__(self, arguments: argparse.Namespace, logs: Path) -> None:
        self.began = time.monotonic()
        self.end = self.began + 60 * arguments.minutes - NEEDED
        self.arguments = arguments
        self.folder: Path | None = None  # nothing is written before there is a GPU
        self.logs = logs
        self.warming: dict[str, Any] = {}  # part -> processes that compile for it
        self.machine_file = self.logs / "machine.json"
        self.machine_file.write_text("{}")
        self.document: Record = {
            "schema": SCHEMA,
            "command": shlex.join(["python", "-m", "benchmarks.gpu_check", *sys.argv[1:]]),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"host": describe_host(arguments.commit)},
            "compiled_ahead": {},
            "parts": {},
            "verdicts": [],
        }

    def run(self) -> int:
        """All parts; returns the exit status."""
        records = self.part("machine", 90.0)
        for record in records:
            hidden = ("name", "seconds", "status")
            self.document["machine"] |= {k: v for k, v in record.items() if k not in hidden}
        if records[0]["status"] != "passed":
            reason = records[0].get("reason", "")
            self.say(f"There is no GPU to check: {reason}. Nothing was measured.")
            self.say("The kernels' logic can be checked here with --interpret.")
            self.say(records[0].get("traceback", ""))
            return 2 if reason == NO_GPU else 1
        self.machine_file.write_text(json.dumps(self.document["machine"]))
        self.folder = self.arguments.output
        self.keep_earlier()
        asked = [part for part in ORDER if part in self.arguments.parts]
        self.warm(asked)
        for part in asked:
            if part in self.warming:
                self.join(part)
            weight = sum(SHARES[other] for other in asked[asked.index(part) :])
            self.part(part, self.left() * SHARES[part] / weight)
        return int(any(r["status"] in ("failed", "error") for p in asked for r in self.parts[p]))

    @property
    def parts(self) -> dict[str, list[Record]]:
        """The records that there are."""
        parts: dict[str, list[Record]] = self.document["parts"]
        return parts

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """One line of progress."""
        if text:
            print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def part(self, name: str, seconds: float) -> list[Record]:
        """Run one part; its records are written one by one."""
        small = self.arguments.interpret
        try:
            names = [case.name for case in part_cases(name, small)]
        except Exception as error:  # such as a module that can't be imported
            names, reason = [], f"{type(error).__name__}: {error}"
            record = {"name": f"the part {name}", "seconds": 0.0, "status": "error"}
            self.parts[name] = [record | {"reason": reason}]
            self.say(f"{name}: {reason}")
        if names:
            self.say(f"{name}: {len(names)} cases, at most {seconds:.0f} s")
            found = self.parts[name] = []
            command = [sys.executable, "-m", "benchmarks.gpu.child", name]
            command += ["--machine", str(self.machine_file)]
            command += ["--interpret"] if small else []

            def report(record: Record) -> None:
                found.append(record)
                self.say(f"{name} {len(found)}/{len(names)} {line(record)}")
                self.write(plots=False)

            limits = Limits(seconds, STALL if name != "vllm" else seconds)
            self.parts[name] = run_isolated(command, names, self.logs / name, limits, report)
        self.write()
        return self.parts[name]

    def warm(self, asked: list[str]) -> None:
        """Start to compile, the first part's kernels at first, the others' while it runs."""
        if self.arguments.interpret or self.arguments.no_compile_ahead:
            return
        from benchmarks.gpu import warm

        parts = [part for part in asked if part in COMPILED_AHEAD]
        for some in (parts[:1], parts[1:]):
            if some:
                self.warming[some[0]] = warm.start(some, self.machine_file, self.logs)

    def close(self) -> None:
        """End what compiles for parts that were never reached."""
        for processes in self.warming.values():
            for process in processes:
                process.kill()
                process.wait()

    def join(self, part: str) -> None:
        """Wait for what compiles ahead of a part, a quarter of the time at most."""
        from benchmarks.gpu import warm

        self.say(f"{part}: waiting for its kernels to be compiled")
        found = warm.finish(self.warming.pop(part), max(1.0, self.left() / 4))
        self.document["compiled_ahead"][part] = found
        self.say(f"compiled ahead: {found}")

    def keep_earlier(self) -> None:
        """Parts of an earlier run, if they are of this GPU and of these sources."""
        if self.folder is None:
            return
        try:
            earlier = json.loads((self.folder / "gpu_check.json").read_text(encoding="utf-8"))
            own = _identity(self.document["machine"])
            same = earlier["schema"] == SCHEMA and _identity(earlier["machine"]) == own
            kept = {p: r for p, r in earlier["parts"].items() if p in ORDER} if same else {}
        except (OSError, ValueError, KeyError, TypeError):
            return
        self.parts.update({p: r for p, r in kept.items() if p not in self.arguments.parts})

    def write(self, plots: bool = True) -> None:
        """The document as it is; with ``plots`` also what is made from it."""
        self.document["verdicts"] = verdicts(self.parts)
        self.document["seconds"] = round(time.monotonic() - self.began, 1)
        if self.folder is None:
            return
        document = plain(self.document)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "gpu_check.json", document)
        if plots:
            (self.folder / "gpu_check.md").write_text(markdown(document), encoding="utf-8")
            try:
                plot(document, self.folder / "gpu_check.png")
            except Exception as error:  # a plot is not worth a run
                self.say(f"no plot: {type(error).__name__}: {error}")


def _identity(machine: Record) -> tuple[object, object]:
    return machine.get("gpu"), machine["host"].get("sources")


def line(record: Record) -> str:
    """A record in one line."""
    words = [record["name"], record["status"]]
    if record["status"] in ("error", "skipped"):
        words.append(str(record.get("reason", ""))[:200].replace("\n", " "))
    for key in ("error", "relative_error", "ours_us", "floor_us", "flash_us", "chosen_over_best"):
        if isinstance(value := record.get(key), float):
            words.append(f"{key} {value:.4g}")
    for step in record.get("steps", ()):
        ratio = f" ({step['ratio']:.3f})" if "ratio" in step else ""
        words.append(f"{step['nodes']}: {step['step_us']:.0f} us{ratio}")
    return ", ".join(words)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything; at most 10")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu")
    parser.add_argument("--commit", help="what is checked, for a copy without git")
    parser.add_argument("--no-compile-ahead", action="store_true")
    parser.add_argument(
        "--interpret", action="store_true", help="a few small cases in Triton's interpreter"
    )
    arguments = parser.parse_args(argv)
    if not 0 < arguments.minutes <= 10:
        parser.error(f"--minutes is {arguments.minutes:g}; it must be above 0 and at most 10")
    if arguments.interpret:
        arguments.parts = [part for part in INTERPRETED if part in arguments.parts]
    elif arguments.output is None:
        arguments.output = ROOT / "benchmarks/results/gpu"
    return arguments


def main() -> int:
    """Run, and say what the verdicts are."""
    arguments = parse()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as logs:
        check = Check(arguments, Path(logs))
        try:
            status = check.run()
        finally:
            check.close()
            check.write()
    if check.parts.keys() - {"machine"}:
        for verdict in check.document["verdicts"]:
            print(f"{verdict['verdict']:>12}  {verdict['claim']}: {verdict['text']}")
    if check.folder is not None:
        print(f"written to {check.folder}")
    return status


if __name__ == "__main__":
    assert set(SHARES) == set(ORDER) and {*ORDER, "machine"} == set(PARTS)
    sys.exit(main())
