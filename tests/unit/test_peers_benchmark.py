"""`python -m benchmarks peers`: other engines in processes of their own."""

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support import assets
from support.fake_engine import FakeEngine

from benchmarks import peers, peers_setup
from benchmarks.engines import answer_limit
from benchmarks.peers import PeersOptions
from vllm_medusa.job import SILENT, JobFailed
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.prompts import Prompt

LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}


def worker(**more):
    settings = {"engine": "transformers", "cores": sorted(os.sched_getaffinity(0))[:1]}
    settings |= {"target": assets.TARGET, "eos": [1], "knobs": {}, "dtype": "float32"}
    return peers_setup.worker(settings | {"weights": ""} | more, Path(), SILENT)


@pytest.fixture(scope="module")
def plain():
    with worker() as started:
        yield started


@pytest.fixture
def options(tmp_path):
    heads = Path(assets.HEADS)
    return PeersOptions(
        target=Path(assets.TARGET),
        texts=(assets.ASSETS / "prompts.jsonl",),
        drafter=heads,
        others=(),
        environments=tmp_path,
        dtype="float32",
        prompts=2,
        max_tokens=8,
        rounds=1,
        waves=2,
        temperatures=(0.0, 0.7),
    )


@contextmanager
def fake_vllm(arm, options, more):
    def run(prompts, concurrency, seed):
        assert len(prompts) in (concurrency, 2 * concurrency)  # warm-up, turn
        if arm.name == "n-gram" and concurrency == 2:
            raise RuntimeError("it broke")
        return list(run_batch(prompts, FakeEngine(), concurrency=concurrency, seed=seed)), 1.0

    yield SimpleNamespace(run=run, pid=os.getpid(), version="fake")


def test_a_child_process_generates_and_reports_its_steps(plain):
    ids = tuple(assets.code_prompts(0, 1)[0])
    prompts = [Prompt(0, 1, "0", token_ids=ids), Prompt(1, 2, "1", token_ids=ids)]
    with worker(knobs=LOOKUP) as drafting:
        assert plain.version.startswith("transformers ")
        found = []
        for engine in (plain, drafting):
            engine.sampling = Sampling(max_tokens=24)
            results, seconds = engine.run(prompts, 2, None)
            assert seconds > 0 and [len(r.answers) for r in results] == [1, 1]
            found.append(results)
        for right, own in zip(*found, strict=True):
            assert own.answers[0].token_ids == right.answers[0].token_ids
            assert own.acceptance.tau > right.acceptance.tau == 1
        plain.sampling = Sampling(max_tokens=8, temperature=2.0)
        same, other = (plain.run(prompts, 2, seed)[0][1].answers[0].token_ids for seed in (0, 1))
        assert same != other
        assert plain.run(prompts, 2, 0)[0][1].answers[0].token_ids == same
        found = peers.memory(plain.pid)
        assert found["peak_gb"] > 0.1 and found["pss_gb"] > 0.05


def test_a_failing_engine_says_why(tmp_path, monkeypatch):
    with pytest.raises(JobFailed, match="no_dtype"), worker(dtype="no_dtype"):
        pass
    (tmp_path / "python").write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(JobFailed, match=r"(?s)status 3.*it broke"), worker():
        pass


def test_answers_end_at_eos_and_at_the_limit(plain):
    plain.sampling = Sampling(max_tokens=4)
    prompts = (Prompt(index, 1, "0", token_ids=(5,)) for index in range(99))
    prompt = next(each for each in prompts if answer_limit(each, 4) == 4)
    ended = plain._answer(prompt, [[7], [8, 1, 9]])
    assert (ended.token_ids, ended.delivered) == ([7, 8, 1], [1, 2])
    assert ended.finish_reason == "stop"
    cut = plain._answer(prompt, [[7], [8, 9, 10, 11], [12]])
    assert (cut.token_ids, cut.delivered) == ([7, 8, 9, 10], [1, 3])
    with pytest.raises(ValueError, match="without EOS"):
        plain._answer(prompt, [[7], [8]])


def test_rows_of_engines_that_can_and_cannot_run(options, monkeypatch):
    def refuse(*arguments):
        raise JobFailed("status 1 from: pip install it")

    monkeypatch.setattr(peers_setup, "_environment", refuse)
    monkeypatch.setattr(peers, "vllm_engine", fake_vllm)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    only = "n-gram|suffix|transformers|OpenVINO fp16, lookup"
    options = replace(options, only=only, batch=(1, 2))
    rows = {row["name"]: row for row in (row.to_dict() for row in peers.run(options, SILENT))}
    assert "not installed" in rows["vLLM, suffix decoding"]["note"]
    for method in ("plain", "lookup"):
        assert "pip install it" in rows[f"OpenVINO fp16, {method}"]["failed"]
        assert "one request" in rows[f"transformers, {method}"]["note"]
        assert f"transformers, {method}, T 0, batch 2" not in rows
    assert not any(name.startswith(("llama.cpp", "OpenVINO int8")) for name in rows)
    assert "sampling" in rows["vLLM, n-gram"]["note"]
    assert "vLLM, n-gram, T 0.7, batch 1" not in rows
    plain, lookup = (rows[f"transformers, {name}, T 0, batch 1"] for name in ("plain", "lookup"))
    assert plain["ratio"] == 1 and plain["equal"] == plain["requests"] == 2
    assert lookup["equal"] == 2 and lookup["tau"] >= 1 and lookup["ratio"] > 0
    assert rows["vLLM, n-gram, T 0, batch 1"]["equal"] == 2
    assert "it broke" in rows["vLLM, n-gram, T 0, batch 2"]["failed"]
    assert rows["vLLM, plain, T 0, batch 2"]["ratio"] == 1
    assert rows["vLLM, plain, T 0.7, batch 2"]["ratio"] == 1


def test_starts_are_combined(options, monkeypatch):
    started = []

    @contextmanager
    def counted(arm, options, more):
        with fake_vllm(arm, options, more) as engine:
            started.append(arm.name)
            if len(started) == 5:  # n-gram's second start
                engine.run = lambda *arguments: 1 / 0
            yield engine

    monkeypatch.setattr(peers, "vllm_engine", counted)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    options = replace(options, only="vLLM, (n-gram|this plugin, lookup)", batch=(1, 2))
    options = replace(options, temperatures=(0.0,), starts=3, rounds=2)
    rows = {row["name"]: row for row in (row.to_dict() for row in peers.run(options, SILENT))}
    assert len(started) == 9 and started[:3] == started[3:6] == started[6:]
    lookup = rows["vLLM, this plugin, lookup, T 0, batch 1"]
    assert lookup["rounds"] == len(lookup["ratios"]) == 6 and lookup["requests"] == 12
    assert "ZeroDivisionError" in rows["vLLM, n-gram, T 0, batch 1"]["failed"]
    assert "it broke" in rows["vLLM, n-gram, T 0, batch 2"]["failed"]
    assert rows["vLLM, plain, T 0, batch 2"]["rounds"] == 6


def test_without_plain_decoding_there_is_nothing_to_compare_with(options, monkeypatch):
    @contextmanager
    def broken(arm, options, more):
        with fake_vllm(arm, options, more) as engine:
            if arm.config is None:
                engine.run = lambda *arguments: 1 / 0
            yield engine

    monkeypatch.setattr(peers, "vllm_engine", broken)
    options = replace(options, only="n-gram", temperatures=(0.0,))
    rows = {row["name"]: row for row in (row.to_dict() for row in peers.run(options, SILENT))}
    assert "ZeroDivisionError" in rows["vLLM, plain, T 0, batch 1"]["failed"]
    assert "plain decoding failed" in rows["vLLM, n-gram, T 0, batch 1"]["failed"]


def test_a_missing_environment_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(peers_setup.REQUIREMENTS, "llama.cpp", ("no-such-package==1",))
    settings = {"engine": "llama.cpp", "weights": "", "target": assets.TARGET}
    with pytest.raises(JobFailed, match=r"-m pip install .*no-such-package==1"):
        peers_setup.prepare(settings, tmp_path, SILENT)


def test_int8_weights_are_the_nearest(tmp_path):
    source = Path(assets.TARGET)
    made = peers_setup.quantized(source, tmp_path, SILENT)
    assert peers_setup.quantized(source, tmp_path, SILENT) == made
    before, after = (load_file(each / "model.safetensors") for each in (source, made))
    int8 = {name for name, tensor in after.items() if tensor.dtype == torch.int8}
    assert len(int8) == 7 * sum("input_layernorm" in name for name in before)
    assert {f"{name}_scale" for name in int8} == set(after) - set(before)
    for name, weight in before.items():
        if name in int8:
            scale = after[f"{name}_scale"]
            assert after[name].abs().amax() == 127
            assert ((after[name] * scale - weight.float()).abs() <= 0.501 * scale).all()
        else:
            assert torch.equal(after[name], weight)
    assert {file.name for file in source.iterdir()} <= {file.name for file in made.iterdir()}
