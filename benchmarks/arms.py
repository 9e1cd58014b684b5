"""What is compared: ways to decode with the same target, each an engine in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.case import ROOT
from vllm_medusa.heads import peek_heads
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.offline.engine import EngineSettings, Sampling
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt, read_prompts
from vllm_medusa.options import AtLeastZero, Dtype, FromZero, Options, Positive, option
from vllm_medusa.tree.topology import MAX_NODES

_OPENMP = "libiomp5.so"  # Intel's, which vLLM recommends: from intel-openmp, beside Python's own
_KV_BYTES = 1 << 30
_PREFILLS = 16  # prompts of full length that a step has room for


class ArmOptions(Options):
    """What all arms have in common."""

    target: Path = option("folder of the target", positional=True)
    heads: Path = option("folder of its heads, or of an EAGLE drafter", positional=True)
    tree: Path | None = option(
        "JSON of `vllm-medusa tree --output`, or paths, best first; absent: the heads' own",
        default=None,
    )
    prompt_file: Path = option(
        default=ROOT / "tests" / "assets" / "prompts.jsonl", shown="tests/assets/prompts.jsonl"
    )
    prompts: Positive = option("so many of them, again from the first if it has fewer", default=8)
    max_tokens: Positive = option("of each answer", default=64)
    batch: tuple[Positive, ...] = option("requests at a time", default=(1,))
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.0, 0.8))
    dtype: Dtype = option(default="bfloat16")
    max_model_len: Positive = option(default=512)
    cores: tuple[FromZero, ...] = option("core ids, on CPUs", default=(0, 1))
    openmp: Literal["iomp", "gomp"] = option(
        "Intel's OpenMP, or the one of PyTorch", default="iomp"
    )
    eager: bool = option("no torch.compile", default=False)

    def read_prompts(self) -> list[Prompt]:
        """`num_prompts` of them, again from the first, each with an index of its own.

        Raises:
            ValueError: there is a line that is not a prompt, or no line.

        """
        found = []
        for prompt in read_prompts(self.prompt_file):
            if not isinstance(prompt, Prompt):
                raise ValueError(f"{self.prompt_file}, line {prompt.line}: {prompt.reason}")
            found.append(prompt)
        if not found:
            raise ValueError(f"{self.prompt_file}: no prompts in it.")
        return [replace(found[i % len(found)], index=i) for i in range(self.num_prompts())]

    def num_prompts(self) -> int:
        """So many as ``prompts`` says or the largest batch takes."""
        return max(self.prompts, *self.batch)

    @property
    def method(self) -> str:
        """Of the drafter: an EAGLE's, or heads'."""
        return drafter_method(self.heads) or "medusa"

    def drafter(self) -> dict[str, Any]:
        """What its speculative configurations begin with."""
        return {"method": self.method, "model": str(self.heads.absolute())}

    def paths(self) -> list[list[int]]:
        """The tree, best nodes first; empty if the heads bring none."""
        if self.tree is None:
            if self.method != "medusa":
                return []
            own = peek_heads(self.heads).tree
            return own if isinstance(own, list) else []
        document = json.loads(self.tree.read_text(encoding="utf-8"))
        found: list[list[int]] = document["tree"] if isinstance(document, dict) else document
        return found


@dataclass(frozen=True)
class Arm:
    """One way to decode."""

    name: str
    kind: Literal["plain", "ours", "stock"]
    num_draft_tokens: int = 0
    speculative_config: Mapping[str, Any] | None = None

    @property
    def copies(self) -> bool:
        """Whether it looks texts up."""
        return bool((self.speculative_config or {}).get("lookup"))

    @property
    def learns(self) -> bool:
        """Whether it measures what steps cost, which the plugin keeps on disk."""
        return (self.speculative_config or {}).get("budget") == "auto"


PLAIN = Arm("plain", "plain")
AUTOMATIC = "automatic"


def tree_arm(options: ArmOptions, nodes: int) -> Arm | None:
    """The first so many nodes of the tree; None if it has fewer."""
    paths = options.paths()
    config = options.drafter() | {"tree": paths[:nodes]}
    return Arm(f"tree {nodes}", "ours", nodes, config) if nodes <= len(paths) else None


def chain_arm(options: ArmOptions, depth: int) -> Arm:
    """A tree of a single spine, through our engine."""
    eagle = options.method != "medusa"
    own = (
        {"tree": "chain", "num_speculative_tokens": depth} if eagle else {"tree": {"chain": depth}}
    )
    config = options.drafter() | own
    return Arm(f"chain {depth}, ours", "ours", depth, config)


def dynamic_arm(options: ArmOptions, budget: int | str) -> Arm:
    """A tree of its own for every request and step: of so many draft nodes, or "auto"."""
    config = options.drafter() | {"budget": budget}
    if options.method != "medusa":  # without a tree it is vLLM's own path
        config["tree"] = "dynamic"
    if isinstance(budget, int):
        return Arm(f"dynamic {budget}", "ours", budget, config)
    return Arm(AUTOMATIC, "ours", 0, config)


def stock_arm(options: ArmOptions, depth: int) -> Arm:
    """VLLM's own chain of the same drafter, without this package."""
    config = options.drafter() | {"num_speculative_tokens": depth}
    return Arm(f"chain {depth}, vLLM's", "stock", depth, config)


def ngram_arm(tokens: int) -> Arm:
    """VLLM's n-gram lookup."""
    config = {"method": "ngram", "num_speculative_tokens": tokens}
    return Arm(
        f"n-gram {tokens}, vLLM's",
        "stock",
        tokens,
        config | {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    )


def chosen(arms: list[Arm | None], only: str | None) -> list[Arm]:
    """Those that there are and whose name matches a regular expression."""
    return [arm for arm in arms if arm is not None and re.search(only or "", arm.name)]


def settings(arm: Arm, options: ArmOptions) -> EngineSettings:
    """The engine of an arm."""
    requests = max(8, *options.batch)
    arguments = {
        "max_num_seqs": requests,
        # prompts are never split (vLLM on CPU can't chunk seeded ones), trees always fit
        "max_num_batched_tokens": max(
            options.max_model_len * min(requests, _PREFILLS), MAX_NODES * requests
        ),
        "enable_prefix_caching": False,  # the same prompts come again and again
        "enforce_eager": options.eager,
        "kv_cache_memory_bytes": _KV_BYTES,
    }
    if arm.copies:  # which are counted
        arguments["disable_log_stats"] = False
    return EngineSettings(
        str(options.target.absolute()),
        arm.speculative_config,
        options.dtype,
        options.max_model_len,
        arguments,
    )


def sampling(options: ArmOptions, temperature: float) -> Sampling:
    """Of all requests."""
    return Sampling(max_tokens=options.max_tokens, temperature=temperature)


@contextmanager
def engine(arm: Arm, options: ArmOptions, temperature: float) -> Iterator[EngineProcess]:
    """An arm's engine, started; it knows nothing of what earlier ones learned."""
    with tempfile.TemporaryDirectory() as costs:
        with environment(arm, options):
            if arm.learns:
                os.environ["VLLM_CACHE_ROOT"] = costs
            process = EngineProcess(settings(arm, options), sampling(options, temperature))
        with process:
            yield process


@contextmanager
def environment(arm: Arm, options: ArmOptions) -> Iterator[None]:
    """What processes that are started inside find in their environment.

    On CPUs the binding to cores is what vLLM's own multiprocess executor sets for its workers;
    engines in one process get none unless it is there from the start.

    Raises:
        ValueError: Intel's OpenMP is not installed.

    """
    import torch

    kept = dict(os.environ)
    plugin = "medusa" if arm.kind == "ours" else "none"
    os.environ |= {"VLLM_PLUGINS": plugin, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not torch.accelerator.is_available():
        os.environ |= _binding(options)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _binding(options: ArmOptions) -> dict[str, str]:
    ids = ",".join(map(str, options.cores))
    bound = {"OMP_NUM_THREADS": str(len(options.cores)), "VLLM_CPU_OMP_THREADS_BIND": ids}
    if options.openmp == "gomp":
        return bound | {"GOMP_CPU_AFFINITY": ids.replace(",", " ")}
    library = Path(sys.prefix) / "lib" / _OPENMP
    if not library.exists():
        raise ValueError(f"{library} is not there: install intel-openmp, or use --openmp gomp")
    bound["LD_PRELOAD"] = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    bound["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{ids}]"
    return bound | {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
