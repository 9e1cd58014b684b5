"""Tokens per step of several drafters of one target: dynamic trees of one size, and chains.

    python -m benchmarks drafters TARGET HEADS MORE_HEADS EAGLE_DRAFTER --texts PROMPTS.jsonl

Heads and EAGLE drafters (folders) alike. Tokens have to be plain vLLM's. Counts depend on nothing
but the texts: no quiet machine is needed. What stands behind +- is the standard error from prompt
to prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import lookup
from benchmarks.arms import Arm
from benchmarks.case import Row
from vllm_medusa.heads.eagle import drafter_method
from vllm_medusa.job import Progress
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import Positive, option


class DraftersOptions(lookup.LookupOptions):
    """What is measured."""

    others: tuple[Path, ...] = option("more heads or drafters", default=(), metavar="HEADS")
    chain: Positive = option("draft tokens of the chains", default=4)


def arms(options: DraftersOptions) -> Iterator[Arm]:
    """A dynamic tree and a chain of each."""
    for folder in (options.heads, *options.others):
        where, name = str(folder.absolute()), folder.name
        tree = medusa_config(where, budget=str(options.nodes))
        yield Arm(f"{name}, dynamic {options.nodes}", "ours", options.nodes, tree)
        chain: dict[str, Any] = {"num_speculative_tokens": options.chain, "tree": "chain"}
        if drafter_method(where) is None:
            chain = {"tree": {"chain": options.chain}}
        config = {"method": tree["method"], "model": where} | chain
        yield Arm(f"{name}, chain {options.chain}", "ours", options.chain, config)


def run(options: DraftersOptions, progress: Progress) -> Iterator[Row]:
    """A row for each drafter, form, temperature and file of prompts."""
    yield from lookup.rows(list(arms(options)), options, progress)


CASE = replace(lookup.CASE, options=DraftersOptions, run=run, bars=("tau",), picture=None)
