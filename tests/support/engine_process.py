"""An engine in a separate process: ``python -m support.engine_process JOB.json``.

The job has the engine's arguments and batches of requests; the answers are written as JSON
(``JOB.json.answers``). If the job has ``last``, one more batch is started, during which a test
kills one of the engine's processes; the resulting error is written to ``JOB.json.error``.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parents[1]
ENGINE: dict[str, Any] = {  # common arguments
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 64 << 20,
}

if __name__ == "__mp_main__" and "RAY_ADDRESS" in os.environ:  # the engine that `main` spawns
    from support.ray_on_cpu import call_cpus_gpus

    call_cpus_gpus()


@contextmanager
def engine_process(
    job: dict[str, Any], folder: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job; its remaining processes are killed at the end of the block."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    settings |= {"PYTHONPATH": search, "VLLM_LOGGING_LEVEL": "INFO"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)],
            env=inherited | settings | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for left in of_session(process.pid):
                left.send_signal(signal.SIGKILL)
            process.wait(30)


def answers(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> Any:
    """Wait for the answers; fails with the end of the log if the process ends before."""
    wait_for(folder / "job.json.answers", process, folder, seconds)
    return json.loads((folder / "job.json.answers").read_text())


def wait_for(path: Path, process: subprocess.Popen[bytes], folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            log = (folder / "log").read_text(errors="replace")
            state = f"ended with {process.poll()}" if process.poll() is not None else "runs on"
            raise AssertionError(f"no {path.name}; the process {state}\n{log[-6000:]}")
        time.sleep(0.2)


def of_session(leader: int) -> list[psutil.Process]:
    """The live processes of a session, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return found


def batch(
    prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], known: Any = ()
) -> dict[str, Any]:
    """Requests of a job; ``known`` is for `RecordingWorker.plant`."""
    return {"prompts": list(prompts), "params": list(params), "known": list(known)}


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    if job.get("replicas"):
        put(path, "answers", asyncio.run(replicas(job)))
        return
    if job.get("ray"):
        from support.ray_on_cpu import start_ray

        start_ray(num_devices=job["ray"])
    from vllm import LLM

    llm = LLM(**job["engine"])
    results = {name: llm.collective_rpc(name) for name in ("process_id", "shard")}
    results["batches"] = []
    for requests in job["batches"]:
        llm.collective_rpc("plant", args=(requests["known"],))
        completions = generate(llm, requests)
        ranks = llm.collective_rpc("take_decisions")
        results["batches"].append({"completions": completions, "ranks": ranks})
    put(path, "answers", results)
    if "last" in job:
        try:
            put(path, "finished", generate(llm, job["last"]))
        except BaseException as error:
            put(path, "error", {"type": type(error).__name__, "message": str(error)})
            raise


def generate(llm: Any, requests: dict[str, Any]) -> list[Any]:
    """Token ids, finish reason and stop reason of every request."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in requests["prompts"]],
        [SamplingParams(**params) for params in requests["params"]],
        use_tqdm=False,
    )
    return [plain(output.outputs[0]) for output in outputs]


def plain(output: Any) -> list[Any]:
    """The contents of `support.engines.Completion`, as JSON."""
    return [list(output.token_ids), output.finish_reason, output.stop_reason]


async def replicas(job: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM's own load balancer, which distributes requests round-robin."""
    from prometheus_client import REGISTRY
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.engine.async_llm import AsyncLLM

    # On CPUs vLLM spawns its processes, each importing it; here a fork server has imported it once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    utils.get_mp_context = coordinator.get_mp_context = lambda: context
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))

    async def complete(index: int, prompt: list[int], params: dict[str, Any]) -> list[Any]:
        sampling = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        rank = index % job["replicas"]
        stream = engine.generate(
            {"prompt_token_ids": prompt}, sampling, str(index), data_parallel_rank=rank
        )
        return [plain(output.outputs[0]) async for output in stream][-1]

    try:
        results = []
        number = 0
        for requests in job["batches"]:
            tasks = []
            for prompt, params in zip(requests["prompts"], requests["params"], strict=True):
                tasks.append(complete(number, prompt, params))
                number += 1
            results.append({"completions": await asyncio.gather(*tasks)})
        name = "vllm:spec_decode_num_drafts"
        drafts = {
            sample.labels["engine"]: sample.value
            for metric in REGISTRY.collect()
            if metric.name == name
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
        return {"batches": results, "drafts": drafts}
    finally:
        engine.shutdown()


def put(path: Path, kind: str, content: Any) -> None:
    """Write an answer atomically, for processes that wait for the file."""
    draft = Path(f"{path}.{kind}.part")
    draft.write_text(json.dumps(content))
    draft.rename(f"{path}.{kind}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
