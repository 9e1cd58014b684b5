"""The GPU check's own workings, as far as they can be seen without a GPU.

Kernels are interpreted in processes of their own (see `support.interpreter`); times there come from
a clock that makes them up.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import end_to_end
from benchmarks.gpu.attention_checks import MIXED, Shape, _planted, judge
from benchmarks.gpu.cases import Case, Lab, NotHere, plain, run_case
from benchmarks.gpu.clock import HostClock
from benchmarks.gpu.decoder import plant
from benchmarks.gpu.isolation import Limits, run_isolated
from benchmarks.gpu.kernel_speed import floors
from benchmarks.gpu.layouts import COLD, Spec, copies_of, step_tree
from benchmarks.gpu.machine import sources_digest
from benchmarks.gpu.problems import random_problem
from benchmarks.gpu.report import markdown, plot
from benchmarks.gpu.storage import Storage
from benchmarks.gpu.verdicts import bound_by_arithmetic, fraction, verdicts
from benchmarks.gpu_check import Check, line, parse
from vllm_medusa.sampler import greedy_verdict
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

ROOT = Path(__file__).parents[2]
MACHINE = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 8e14, "l2_bytes": 60_000_000}


def lab(**machine: object) -> Lab:
    return Lab("cpu", HostClock(), Storage("cpu", 1 << 20), machine)


def run(code: str, interpret: bool, timeout: int = 500) -> str:
    """The output of a program of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["TRITON_INTERPRET"] = "1" if interpret else "0"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        timeout=500,
    )


# --- cases ----------------------------------------------------------------------------------------


def fail(_: Lab) -> dict[str, object]:
    raise ValueError("planted")


def missing(_: Lab) -> dict[str, object]:
    raise NotHere("no such thing")


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda _: {"error": 1.0}, "passed"),
        (lambda _: {"passed": True}, "passed"),
        (lambda _: {"passed": False, "error": 2.0}, "failed"),
        (fail, "error"),
        (missing, "skipped"),
    ],
)
def test_a_case_ends_as_a_record(call, status):
    record = run_case(Case("it", call), lab())
    assert (record["name"], record["status"]) == ("it", status)
    assert record["seconds"] >= 0 and "passed" not in record
    if status == "error":
        assert record["reason"] == "ValueError: planted" and "in fail" in record["traceback"]
    if status == "skipped":
        assert record["reason"] == "no such thing"
    assert "it" in line(record)


def test_records_are_strict_json():
    value = {"a": (1, math.nan), 2: math.inf, "c": Path("x"), "d": [True, None, 1 / 3]}
    text = json.dumps(plain(value), allow_nan=False)
    assert json.loads(text) == {"a": [1, "nan"], "2": "inf", "c": "x", "d": [True, None, 0.333333]}


CHILD = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.cases import Case, Lab, run_cases
from benchmarks.gpu.clock import HostClock

names, lines = Path(sys.argv[2]), Path(sys.argv[4])

def raises(lab):
    raise RuntimeError("planted")

def crashes(lab):
    print("last words", flush=True)
    os._exit(7)

cases = [
    Case("a", lambda lab: {"value": 1}),
    Case("raises", raises),
    Case("crashes", crashes),
    Case("hangs", lambda lab: time.sleep(600)),
    Case("b", lambda lab: {"passed": False}),
]
sys.exit(run_cases(cases, names.read_text().splitlines(), Lab("cpu", HostClock(), None, {}), lines))
"""


def test_a_case_that_crashes_or_hangs_costs_itself_alone(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    told: list[dict[str, object]] = []
    environment = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        records = run_isolated(
            [sys.executable, str(tmp_path / "child.py")],
            ["a", "raises", "crashes", "hangs", "b"],
            tmp_path / "logs",
            Limits(60, 3),
            told.append,
        )
    finally:
        del os.environ["PYTHONPATH"]
        if environment is not None:
            os.environ["PYTHONPATH"] = environment
    found = {record["name"]: record for record in records}
    statuses = {name: record["status"] for name, record in found.items()}
    errors = dict.fromkeys(("raises", "crashes", "hangs"), "error")
    assert statuses == {"a": "passed", "b": "failed", **errors}
    assert found["raises"]["reason"] == "RuntimeError: planted"
    assert found["crashes"]["reason"] == "its process ended with status 7"
    assert "last words" in found["crashes"]["traceback"]
    assert found["hangs"]["reason"] == "it did not end within 3 s"
    assert [record["name"] for record in told] == ["a", "raises", "crashes", "hangs", "b"]


def test_a_part_without_time_is_skipped_and_one_that_cannot_start_ends(tmp_path):
    records = run_isolated(["unused"], ["a", "b"], tmp_path, Limits(1, 1), lambda record: None)
    assert [(r["status"], r["reason"]) for r in records] == [("skipped", "no time was left")] * 2
    broken = [sys.executable, "-c", "raise SystemExit('no such module')"]
    records = run_isolated(broken, ["a", "b"], tmp_path, Limits(60, 60), lambda record: None)
    assert [r["status"] for r in records] == ["error", "error"]
    assert "no such module" in records[0]["traceback"]


# --- arithmetic -----------------------------------------------------------------------------------


def test_floors():
    spec = Spec("Llama-2-7B", 32, 32, 1, 4096, 64)
    assert spec.kv_bytes == 4160 * 32 * 128 * 2 * 2
    memory, arithmetic = floors(spec, lab(**MACHINE))
    assert memory == pytest.approx(spec.kv_bytes / 4e12 * 1e6)
    assert arithmetic == pytest.approx(4 * 64 * 32 * 4160 * 128 / 8e14 * 1e6)
    assert floors(spec, lab()) == (None, None)
    half = Spec("Llama-2-7B", 32, 32, 1, 4096, 64, torch.float8_e4m3fn)
    assert half.kv_bytes * 2 == spec.kv_bytes
    # 64 nodes of 8 heads a key head: 512 operations a byte, more than the GPU has
    grouped = Spec("Llama-3-70B", 64, 8, 1, 4096, 64)
    for asked, bound in ((spec, False), (grouped, True)):
        names = dict(zip(("floor_us", "arithmetic_us"), floors(asked, lab(**MACHINE)), strict=True))
        assert bound_by_arithmetic(names) is bound


def test_caches_are_cold_together_and_fit():
    storage = Storage("cuda", 40 << 30)  # nothing is taken from it
    small, large = (Spec("", 32, 32, b, 4096, 64) for b in (1, 64))
    copies = copies_of(small, storage, 60_000_000)
    assert (copies - 1) * small.kv_bytes < COLD * 60_000_000 <= copies * small.kv_bytes
    assert copies_of(large, storage, 60_000_000) == 1
    assert copies_of(Spec("", 8, 1, 1, 16, 1), storage, 60_000_000) == 256
    with pytest.raises(NotHere, match="GB of cache"):
        Storage("cpu", 1000).take(2, 300, torch.bfloat16)


def test_storage_gives_memory_that_is_not_shared():
    storage = Storage("cpu", 1 << 20)
    a, b = storage.take(2, 1000, torch.bfloat16)
    assert len(a) == len(b) == 1000 and a.isfinite().all() and a.std() > 0.5
    assert b.data_ptr() - a.data_ptr() >= 2000
    (c,) = storage.take(1, 3000, torch.float8_e4m3fn)
    assert c.float().isfinite().all() and c.float().max() > 1


def speed(name: str = "x", status: str = "passed", **fields: object) -> dict[str, object]:
    record = {"name": name, "status": status, "layout": "L", "heads": 8, "kv_heads": 8, "batch": 1}
    record |= {
        "planned": 0,
        "context": 4096,
        "nodes": 64,
        "cache": "bfloat16",
        "splits": 4,
        "floor_us": 8.0,
    }
    return record | {"arithmetic_us": 1.0, "ours_us": 10.0, "ours_eager_us": 60.0, **fields}


def by_claim(parts: dict[str, list[dict[str, object]]], word: str) -> dict[str, object]:
    return next(v for v in verdicts(parts) if word in str(v["claim"]))


def test_the_verdict_on_the_floor():
    good, bad = speed(), speed("slow", ours_us=10.1)
    loose = speed(planned=32768, ours_us=99.0)
    short, wrong = speed(context=1024, ours_us=99.0), speed(status="failed", ours_us=99.0)
    heavy = speed("heavy", arithmetic_us=11.0, ours_us=20.0)
    assert fraction(good) == 0.8 and fraction(speed(floor_us=None)) is None
    assert by_claim({"speed": [good, loose, short, wrong]}, "floor")["verdict"] == "met"
    found = by_claim({"speed": [good, bad, heavy]}, "floor")
    assert found["verdict"] == "not met"
    assert found["text"] == (
        "1 of 3 shapes; 1 of the 2 that arithmetic does not forbid; worst of those 79% at slow"
    )
    for none in ([], [wrong], [short]):
        assert by_claim({"speed": none}, "floor")["verdict"] == "not measured"


def test_the_verdict_on_flash():
    found = by_claim({"speed": [speed(flash_us=20.0), speed(flash_us=5.0), speed()]}, "Flash")
    assert found["verdict"] == "met"
    assert found["text"].startswith("ours / flash: mean 1.00, 0.50 to 2.00")
    assert by_claim({"speed": [speed(flash_us=9.9)]}, "Flash")["verdict"] == "not met"
    assert by_claim({"speed": [speed()]}, "Flash")["verdict"] == "not measured"


def step_record(batch: int, ratio: float, status: str = "passed") -> dict[str, object]:
    steps: list[dict[str, object]] = [{"nodes": 1, "step_us": 100.0}]
    steps.append({"nodes": 64, "step_us": 100 * ratio, "ratio": ratio, "ratio_shared": 1.1})
    record = {"name": f"7B, batch {batch}", "status": status, "model": "7B", "batch": batch}
    return record | {"context": 1024, "plain_floor_us": 80.0, "steps": steps}


def test_the_verdict_on_steps():
    parts = {"step": [step_record(1, 1.16), step_record(4, 2.0), step_record(1, 1.0, "failed")]}
    found = [v for v in verdicts(parts) if "plain step" in v["claim"]]
    assert [(v["verdict"], v["text"]) for v in found] == [("not met", "1.160"), ("met", "1.100")]
    assert by_claim({}, "plain step")["verdict"] == "not measured"


def test_the_verdicts_on_tiles_and_checks():
    tiles = [
        {"name": n, "status": "passed", "chosen_over_best": r} for n, r in (("a", 1.1), ("b", 1.0))
    ]
    assert by_claim({"tiles": tiles}, "`tiles`")["verdict"] == "met"
    tiles[0]["chosen_over_best"] = 1.2
    assert by_claim({"tiles": tiles}, "`tiles`")["text"] == "1 of 2 shapes; worst 1.20 at a"
    rows = [{"name": "a", "status": s} for s in ("passed", "skipped", "error")]
    assert by_claim({"kernels": rows}, "kernels")["text"] == "1 passed, 1 error, 1 skipped"
    assert by_claim({"kernels": rows}, "kernels")["verdict"] == "not met"
    assert by_claim({"kernels": rows[:2]}, "kernels")["verdict"] == "met"
    skipped = [{"name": "a", "status": "skipped", "reason": "vLLM is not installed"}]
    found = by_claim({"vllm": skipped}, "vllm")
    assert found["verdict"] == "not measured" and "vLLM is not installed" in found["text"]


# --- engines --------------------------------------------------------------------------------------


class Engines:
    """In the place of processes: they find the same tokens, and say what ``says`` gives them."""

    def __init__(self, says: str = "") -> None:
        self.says = says
        self.asked: list[dict[str, object]] = []
        self.environments: list[dict[str, str]] = []

    def run(
        self, command: list[str], env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        self.asked.append(json.loads(command[-1])["engine"])
        self.environments.append(env)
        found = {t: {"ids": [[1, 2]] * end_to_end.PROMPTS, "seconds": 1.0} for t in ("0.0", "0.8")}
        said = self.says if "speculative_config" in self.asked[-1] else ""
        return subprocess.CompletedProcess(command, 0, f"FOUND{json.dumps(found)}\n", said)


@pytest.mark.parametrize(
    ("says", "passed"),
    [
        ("", True),
        ("Triton kernel JIT compilation during inference: attend. This causes", False),
        ("Triton kernel JIT compilation during inference: _of_vllm. This causes", True),
        ("/x/vllm_medusa/worker/a.py:7: UserWarning: called a synchronizing CUDA", False),
        ("/x/vllm_medusa/a.py:7: UserWarning: Tensor.to: that may be silently synchronous", False),
        ("/x/vllm/worker/a.py:7: UserWarning: called a synchronizing CUDA operation", True),
    ],
)
def test_engines_are_compared_alike_and_watched(monkeypatch, says, passed):
    engines = Engines(says)
    monkeypatch.setattr(end_to_end, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", engines.run)
    on_cuda = Lab("cuda", HostClock(), Storage("cpu", 0), {})
    for eager in (True, False):
        assert end_to_end.compare(eager, on_cuda)["passed"] == passed
    plain, trees = engines.asked[:2]
    assert trees.pop("speculative_config")["method"] == "medusa"
    assert plain == trees and plain["attention_backend"] == "TRITON_ATTN"
    for environment in engines.environments:  # TF32 would make plain vLLM's tokens others
        assert environment["TRITON_F32_DEFAULT"] == "ieee"
        assert environment["PYTHONPATH"].startswith(str(ROOT))
    watched = ["VLLM_GPU_SYNC_CHECK" in environment for environment in engines.environments]
    assert watched == [False, True, False, False]


@pytest.mark.parametrize(
    ("active", "asked", "status"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_an_engine_without_the_plugin_is_no_engine_with_trees(tmp_path, active, asked, status):
    """Stock vLLM has a Medusa of its own, a chain, whose tokens are right as well."""
    (tmp_path / "vllm.py").write_text(
        textwrap.dedent(f"""
        from types import SimpleNamespace as Some
        SamplingParams = Some
        class LLM:
            def __init__(self, **engine):
                config = Some(
                    additional_config={{"medusa": {{}}}} if {active} else None,
                    parallel_config=Some(worker_cls="W"),
                )
                self.llm_engine = Some(vllm_config=config)
            def generate(self, prompts, params, use_tqdm):
                return [Some(outputs=[Some(token_ids=[1])]) for _ in prompts]
        """)
    )
    engine = {"speculative_config": {}} if asked else {}
    given = {"engine": engine, "prompts": ["a"], "temperatures": [0.0], "tokens": 1}
    done = subprocess.run(
        [sys.executable, "-c", end_to_end._ENGINE, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert bool(done.returncode) == bool(status), done.stderr
    assert ("trees were asked for" in done.stderr) == bool(status)


def test_the_names_of_our_kernels():
    assert {"attend", "merge", "walk", "vocabulary"} <= end_to_end.own_kernels()


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_planted_steps_accept_a_path_that_moves(nodes):
    tree = step_tree(nodes)
    assert (tree.num_nodes, tree.max_depth) == (nodes, 5)
    tensors = TreeTensors.from_tree(tree)
    tokens, targets = plant(tensors, 2, 100)
    batch = TreeBatch.from_static(tensors, torch.full((2,), nodes))
    path = greedy_verdict(batch, tokens, targets).path
    assert path.num_accepted.tolist() == [5, 5]


def test_the_reference_notices_its_own_planted_error():
    shape = Shape(MIXED, heads=2, kv_heads=1, head_size=16, dtype=torch.float32)
    problem = random_problem(shape, 0, "cpu")
    out, lse = (t.float() for t in problem.expected())
    assert judge(problem, out, lse, lab())["passed"]
    assert not judge(_planted(problem, shape), out, lse, lab())["passed"]
    spare = random_problem(Shape(MIXED, heads=2, kv_heads=1, head_size=16, spare_rows=2), 0, "cpu")
    written = [t.to(spare.query.dtype) for t in spare.expected()]
    written[0][-1] = 0
    record = judge(spare, written[0], written[1].float(), lab())
    assert not record["passed"] and not record["spare_rows_untouched"]


PARTS_WITH_A_CLOCK = """
    import json
    from benchmarks.gpu.cases import run_case
    from benchmarks.gpu.child import make_lab, part_cases

    class MadeUp:
        '''Every graph takes 40 us, its calls are made once.'''
        def graph(self, call):
            call()
            return lambda: None
        def device(self, call, repeats=9):
            call()
            return [40.0, 30.0, 50.0]
        def wall(self, call, repeats=15):
            call()
            return [90.0]

    lab = make_lab({"copy_bytes_per_s": 4e9, "matmul_flop_per_s": 8e11, "l2_bytes": 4}, True)
    lab.clock = MadeUp()
    names = ("kernels", "speed", "tiles", "step")
    print(json.dumps({p: [run_case(c, lab) for c in part_cases(p, True)] for p in names}))
"""


def test_every_measurement_runs_and_is_reported(tmp_path):
    parts = json.loads(run(PARTS_WITH_A_CLOCK, interpret=True).splitlines()[-1])
    for records in parts.values():
        assert {record["status"] for record in records} == {"passed"}, records
    assert len(parts["kernels"]) == 6
    (timed, mixed), (sweep,), (step,) = parts["speed"], parts["tiles"], parts["step"]
    assert mixed["ours_us"] == mixed["trees_us"] == mixed["chunk_us"] == mixed["flash_chunk_us"]
    tokens, pairs = 2 * 25 + 40, 2 * 5 * 25 + 40**2 / 2
    assert mixed["floor_us"] == pytest.approx(tokens * 2 * 16 * 2 * 2 / 4e9 * 1e6)
    assert mixed["arithmetic_us"] == pytest.approx(4 * pairs * 4 * 16 / 8e11 * 1e6)
    assert timed["ours_us"] == timed["flash_us"] == 40 and timed["ours_eager_us"] == 90
    assert timed["masked_us"] is None and timed["masked_reason"]  # CUDA only
    assert timed["floor_us"] == pytest.approx(2 * 45 * 2 * 16 * 2 * 2 / 4e9 * 1e6)
    assert sweep["chosen"]["us"] == 40 and sweep["chosen_over_best"] == 1
    assert len(sweep["variants"]) >= 3
    plain_step, tree_step = step["steps"]
    assert (plain_step["nodes"], tree_step["nodes"], tree_step["ratio"]) == (1, 7, 1.0)
    document = {
        "machine": {"gpu": "G", "host": {"commit": "abc"}, **MACHINE},
        "command": "c",
        "parts": parts | {"vllm": [{"name": "v", "status": "error", "reason": "a\nb|"}]},
        "verdicts": verdicts(parts),
    }
    text = markdown(document)
    for words in (
        "## Attention",
        "## Tiles",
        "## A decode step",
        "| vllm | v | error | a b/ |",
        "copy 4.00 TB/s",
    ):
        assert words in text
    assert plot(document, tmp_path / "a.png") and (tmp_path / "a.png").stat().st_size > 10_000
    assert not plot({"machine": document["machine"], "parts": {}}, tmp_path / "b.png")


def test_kernels_are_compiled_ahead(tmp_path):
    """One case of the attention checks, for a GPU that isn't there."""
    machine = {"capability": 90, "num_sms": 132, "shared_bytes": 227 * 1024}
    code = f"""
        import os
        os.environ["TRITON_CACHE_DIR"] = {str(tmp_path)!r}
        from benchmarks.gpu.warm import compile_share
        print("launches", compile_share("attention", 0, 99, {machine}))
    """
    pytest.importorskip("triton")
    assert int(run(code, interpret=False).split()[-1]) >= 2
    assert list(tmp_path.rglob("attend.cubin")) and list(tmp_path.rglob("merge.cubin"))


# --- the command ----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = check("--output", str(tmp_path / "results"))
    assert done.returncode == 2, done.stderr
    assert "There is no GPU to check: torch finds no CUDA GPU" in done.stdout
    assert not (tmp_path / "results").exists()


def test_interpreted_it_writes_a_document(tmp_path):
    done = check("--interpret", "--output", str(tmp_path), "--parts", "attention", "decode")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["schema"] == 1 and document["machine"]["interpreted"]
    assert set(document["machine"]["host"]) >= {"cpu", "cores", "commit", "sources"}
    assert list(document["parts"]) == ["machine", "attention", "decode"]
    for part, records in document["parts"].items():
        for record in records:
            assert record["status"] == "passed", (part, record)
            assert {"name", "seconds"} <= record.keys()
    attention = document["parts"]["attention"]
    assert all(r["control_noticed"] for r in attention if "graph" not in r["name"])
    assert attention[-1]["equals_eager"]
    text = document["parts"]["decode"][-1]
    assert text["tokens_per_step"] > 2 and text["control_noticed"]
    assert "every case is right | **met**" in (tmp_path / "gpu_check.md").read_text()


def test_the_command_line(capsys):
    assert parse(["--interpret"]).parts == ["attention", "kernels", "decode"]
    assert parse(["--interpret"]).output is None
    assert parse([]).output == ROOT / "benchmarks/results/gpu"
    for minutes in ("0", "11"):
        with pytest.raises(SystemExit):
            parse(["--minutes", minutes])
        assert "at most 10" in capsys.readouterr().err


def test_earlier_parts_are_kept_for_the_same_gpu_and_sources(tmp_path):
    machine = {"gpu": "G", "host": {"sources": sources_digest(ROOT)}}
    earlier = {
        "schema": 1,
        "machine": machine,
        "parts": {"step": [1], "speed": [2], "machine": [3]},
    }
    for gpu, kept in (("G", {"step": [1]}), ("other", {})):
        (tmp_path / "gpu_check.json").write_text(json.dumps(earlier))
        made = Check(parse(["--output", str(tmp_path), "--parts", "speed"]), tmp_path)
        made.document["machine"]["gpu"] = gpu
        made.folder = tmp_path
        made.keep_earlier()
        assert made.parts == kept
