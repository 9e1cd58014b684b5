"""What is compared: ways to decode with the same target, each an engine in its own process.

Engines are long-lived and only one works at a time, so that two arms can take turns on the same
machine and whatever slows it down slows both. They run in-process (no engine-core process beside
the worker): with two cores, a third busy process would take time from whichever arm is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPENMP_LIBRARIES = {"iomp": "libiomp5.so"}  # from the package intel-openmp, beside Python's own


class ArmError(RuntimeError):
    """An engine that failed to start or died; the message holds the end of its log."""


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    name: str
    kind: str  # "plain", "ours", "stock" or "ngram"
    num_draft_tokens: int = 0
    speculative_config: dict[str, Any] | None = None

    @property
    def keeps_seeds(self) -> bool:
        """Whether a seeded request must get plain vLLM's tokens.

        vLLM's own rejection sampling keeps the distribution but draws other random numbers.
        """
        return self.kind in ("plain", "ours")


PLAIN = Arm("plain", "plain")


def our_arms(
    heads: str, depths: Sequence[int], tree: list[list[int]], sizes: Sequence[int]
) -> list[Arm]:
    """Chains of the given depths, and the first so many nodes of a best-first tree."""
    base = {"method": "medusa", "model": heads}
    chains = [Arm(f"chain {d}", "ours", d, base | {"tree": {"chain": d}}) for d in depths]
    trees = [
        Arm(f"tree {n}", "ours", n, base | {"tree": tree[:n]}) for n in sizes if n <= len(tree)
    ]
    return chains + trees


def vllm_arms(heads: str, depths: Sequence[int], ngrams: Sequence[int]) -> list[Arm]:
    """VLLM's own speculation: its Medusa chain on the same heads, and n-gram lookup."""
    stock = [
        Arm(
            f"vLLM chain {d}",
            "stock",
            d,
            {"method": "medusa", "model": heads, "num_speculative_tokens": d},
        )
        for d in depths
    ]
    lookup = [
        Arm(
            f"n-gram {n}",
            "ngram",
            n,
            {
                "method": "ngram",
                "num_speculative_tokens": n,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            },
        )
        for n in ngrams
    ]
    return stock + lookup


@dataclass(frozen=True)
class Machine:
    """How every engine uses the machine."""

    cores: tuple[int, ...]
    openmp: str = "iomp"  # "iomp" (Intel's, what vLLM recommends) or "gomp" (what PyTorch ships)
    multiprocessing: bool = False
    kv_space_gb: int = 1

    def environment(self, arm: Arm) -> dict[str, str]:
        """The environment of an arm's process.

        The binding is what vLLM's own multiprocess executor sets for its workers; in-process
        engines get none unless it is there from the start.
        """
        env = dict(os.environ)
        ids = ",".join(map(str, self.cores))
        env |= {
            "OMP_NUM_THREADS": str(len(self.cores)),
            "VLLM_CPU_OMP_THREADS_BIND": ids,
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gb),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.multiprocessing)),
            "VLLM_PLUGINS": "medusa" if arm.kind == "ours" else "none",
            "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.openmp == "iomp":
            library = Path(sys.prefix) / "lib" / OPENMP_LIBRARIES["iomp"]
            if not library.exists():
                raise ArmError(
                    f"there is no {library.name} beside this Python: install intel-openmp or "
                    "choose --openmp gomp"
                )
            env["LD_PRELOAD"] = (
                f"{library}:{env['LD_PRELOAD']}" if "LD_PRELOAD" in env else str(library)
            )
            env["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{ids}]"
            env["KMP_BLOCKTIME"] = "5"
            env["KMP_TPAUSE"] = "0"
        else:
            env["GOMP_CPU_AFFINITY"] = " ".join(map(str, self.cores))
        return env


class ArmProcess:
    """A started arm; use it as a context manager."""

    def __init__(self, arm: Arm, settings: dict[str, Any], machine: Machine, log: Path) -> None:
        self.arm = arm
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=machine.environment(arm),
                text=True,
            )
        if arm.speculative_config is not None:
            settings = settings | {"speculative_config": arm.speculative_config}
        self._send(settings)
        self.startup: dict[str, Any] = self._reply()

    def ask(self, op: str, **arguments: Any) -> Any:
        """Sends a command of `benchmarks.engine_process` and waits for its reply."""
        self._send({"op": op, **arguments})
        return self._reply()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _reply(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> ArmError:
        tail = "\n".join(self.log.read_text().splitlines()[-25:])
        return ArmError(f"the engine of arm {self.arm.name!r} died; the end of its log:\n{tail}")

    def __enter__(self) -> ArmProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # ends the child's loop
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
