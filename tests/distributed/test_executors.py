"""Engines as users run them, in separate processes: executors of two ranks, and two replicas.

`mp` has heads with their own LM heads, of which each rank keeps half; Ray has heads that score
some tokens with the target's LM head, whose logits are gathered; both have 63 draft nodes. At the
end of each, a rank is killed during a batch.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.eagle import Eagle1
from support.engine_process import ENGINE, answers, batch, engine_process, of_session, wait_for
from support.engines import Completion, engine, medusa
from support.plain import COMMON, Plain, Run, assert_same_decisions, run_greedy, run_seeded
from support.ranks import WORKER, decisions
from support.reference import differing
from support.runner import sized
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TREE: Any = sized("mc_sim_7b_63", {"dense": [2, 2]})
NODES = sized(64, 7)
START_S = 1200.0  # only a hang takes this long
DOWN_S = 240.0  # vLLM gives workers 5 s to exit, another 4 s after SIGTERM, then kills them
COUNT = sized(24, 4)


def batches(plain: Plain, count: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests, whose future tokens are known."""
    greedy = [{"temperature": 0.0, **COMMON}] * count
    seeded = [{"temperature": 1.0, "seed": o.seed, **COMMON} for o in plain.seeded[:count]]
    return [
        batch(plain.greedy.prompts[:count], greedy, plain.known_greedy[:count]),
        batch(plain.prompts[:count], seeded, plain.known_seeded[:count]),
    ]


def completions(result: dict[str, Any]) -> list[Completion]:
    return [Completion(tuple(t), f, s) for t, f, s in result["completions"]]


@dataclass(frozen=True)
class Started:
    executor: str
    process: subprocess.Popen[bytes]
    folder: Path
    workers: list[int]
    shards: list[list[int] | None]  # of the vocabulary; None: a rank scores all of it
    runs: dict[str, Run]
    alone: dict[str, Run]  # the same with one rank, in this process


@pytest.fixture(scope="module", params=sized(["mp", "ray"], ["ray"]))
def started(
    request: pytest.FixtureRequest,
    plain: Plain,
    chaotic_llama: str,
    own_heads: str,
    mapped_heads: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Started]:
    executor: str = request.param
    if executor == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install vllm-medusa[ray]")
    folder = tmp_path_factory.mktemp(executor)
    config = medusa(own_heads if executor == "mp" else mapped_heads, TREE)
    with engine(chaotic_llama, config, worker_cls=WORKER) as llm:
        alone = {"greedy": run_greedy(llm, plain, COUNT), "seeded": run_seeded(llm, plain, COUNT)}
    job = {
        "engine": {
            "model": chaotic_llama,
            "speculative_config": config,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": executor,
            "worker_cls": WORKER,
            **ENGINE,
        },
        "batches": batches(plain, COUNT),
        "last": batch(plain.prompts, [{**COMMON, "max_tokens": 900}] * len(plain.prompts)),
    }
    if executor == "ray":
        job["ray"] = 2  # devices: see support.ray_on_cpu
    with engine_process(job, folder) as process:
        reply = answers(process, folder, START_S)
        runs = [
            Run(completions(result), [decisions(rows) for rows in result["ranks"]])
            for result in reply["batches"]
        ]
        kinds = dict(zip(("greedy", "seeded"), runs, strict=True))
        yield Started(executor, process, folder, reply["process_id"], reply["shard"], kinds, alone)


def test_greedy_tokens(started: Started, plain: Plain) -> None:
    assert differing(plain.greedy.completions[:COUNT], started.runs["greedy"].completions) == []


def test_seeded_tokens(started: Started, plain: Plain) -> None:
    assert plain.unlike_seeded(started.runs["seeded"].completions) == []


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_the_ranks_agree(started: Started, kind: str) -> None:
    result = started.runs[kind]
    assert result.differing() == 0 and len(result.ranks) == 2
    trees = result.trees
    assert len(trees) > sized(300, 10) and max(made.num_nodes for made in trees) == NODES
    assert sum(len(made.nodes) - 1 for made in trees) > sized(1, 0.6) * len(trees)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_one_rank_decides_the_same(started: Started, plain: Plain, kind: str) -> None:
    """Accepted paths and drafts."""
    halves, of_the_map = [[0, 256], [256, 256]], [[0, 150], [150, 150]]
    assert started.shards == (halves if started.executor == "mp" else of_the_map)
    assert_same_decisions(started.alone[kind], started.runs[kind], plain.unsteady)


def test_a_killed_rank_ends_the_engine(started: Started) -> None:
    """During a batch: an error with the reason, promptly, and no processes left."""
    process, folder = started.process, started.folder
    time.sleep(2)  # during the last batch, which takes minutes
    assert process.poll() is None
    family = of_session(process.pid)
    assert set(started.workers) < {member.pid for member in family}
    psutil.Process(started.workers[1]).kill()
    begun = time.monotonic()
    wait_for(folder / "job.json.error", process, folder, DOWN_S)
    process.wait(DOWN_S)
    print(f"{started.executor}: down after {time.monotonic() - begun:.1f} s")
    assert process.returncode != 0
    assert not (folder / "job.json.finished").exists()
    error = json.loads((folder / "job.json.error").read_text())
    assert error["type"] == "EngineDeadError", error
    reasons = {
        "mp": ["VllmWorker-1 died unexpectedly"],
        "ray": ["rank=[1] died unexpectedly", "A worker died or was killed"],  # whoever is first
    }[started.executor]
    log = (folder / "log").read_text(errors="replace")
    assert any(reason in log for reason in reasons)
    _, alive = psutil.wait_procs(family, timeout=120)
    assert [member for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []


def test_two_replicas(plain: Plain, chaotic_llama: str, tmp_path: Path) -> None:
    """Behind vLLM's balancer (``--data-parallel-size 2``): the same output as one engine's.

    vLLM refuses offline data parallelism for dense models, so the server is used. EAGLE: while
    one replica works, the other runs the drafter on dummy rows too.
    """
    drafter = Eagle1(AutoModelForCausalLM.from_pretrained(chaotic_llama))
    count = sized(8, 4)
    config = {"method": "eagle", "model": drafter.save(tmp_path / "e"), "budget": 8}
    config |= {"tree": {"width": 3, "depth": 3}}
    own = {"model": chaotic_llama, "speculative_config": config, "data_parallel_size": 2}
    job = {"replicas": 2, "engine": ENGINE | own, "batches": batches(plain, count)}
    with engine_process(job, tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1") as process:
        reply = answers(process, tmp_path, 1200)
        process.wait(240)
    assert process.returncode == 0
    greedy, seeded = map(completions, reply["batches"])
    assert differing(plain.greedy.completions[:count], greedy) == []
    assert plain.unlike_seeded(seeded) == []
    assert set(reply["drafts"]) == {"0", "1"} and min(reply["drafts"].values()) > 50
