"""Two replicas behind vLLM's balancer (``--data-parallel-size 2``) match one engine's output.

vLLM refuses offline data parallelism for dense models, so the server is used.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.eagle import Eagle1
from support.engine_process import ENGINE, answers, batch, engine_process
from support.engines import Completion
from support.plain import COMMON, Plain
from support.reference import differing
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

COUNT = 8


def test_two_replicas(plain: Plain, chaotic_llama: str, tmp_path: Path) -> None:
    """EAGLE: while one replica works, the other runs the drafter on dummy rows too."""
    drafter = Eagle1(AutoModelForCausalLM.from_pretrained(chaotic_llama)).save(tmp_path / "e")
    tree = {"width": 3, "depth": 3}
    config = {"method": "eagle", "model": drafter, "tree": tree, "budget": 8}
    job = {
        "replicas": 2,
        "engine": {
            "model": chaotic_llama,
            "speculative_config": config,
            "data_parallel_size": 2,
            **ENGINE,
        },
        "batches": [
            batch(plain.greedy.prompts[:COUNT], [{"temperature": 0.0, **COMMON}] * COUNT),
            batch(
                plain.prompts[:COUNT],
                [{"temperature": 1.0, "seed": o.seed, **COMMON} for o in plain.seeded[:COUNT]],
            ),
        ],
    }
    with engine_process(job, tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1") as process:
        reply = answers(process, tmp_path, 1200)
        process.wait(240)
    assert process.returncode == 0
    greedy, seeded = (
        [Completion(tuple(t), f, s) for t, f, s in result["completions"]]
        for result in reply["batches"]
    )
    assert differing(plain.greedy.completions[:COUNT], greedy) == []
    assert plain.unlike_seeded(seeded) == []
    assert set(reply["drafts"]) == {"0", "1"} and min(reply["drafts"].values()) > 50
