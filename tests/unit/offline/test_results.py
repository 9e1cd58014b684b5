import json
import multiprocessing
import os
import random
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine

from vllm_medusa.files import FileRefused, fingerprint
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.offline.results import ResultLog

SETTINGS = {"model": "m", "sampling": {"temperature": 0.5, "stop": ("a", "b")}}
PROMPTS = [Prompt(i, i + 1, f"r{i}", text=f"prompt number {i} " * 20) for i in range(60)]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def generate(path: Path, step_seconds: float = 0.0) -> None:
    with ResultLog(path, SETTINGS) as log:
        engine = FakeEngine(step_seconds=step_seconds, step_sizes=(2, 1))
        waiting = (p for p in PROMPTS if p.index not in log.done)
        for result in run_batch(waiting, engine, concurrency=4, seed=11):
            log.append(result.to_dict())


@contextmanager
def limited(size: int):
    """Limit the size of files written by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_written_results_are_found_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultLog(path, SETTINGS) as log:
        assert log.done == set()
        log.append({"index": 4, "text": "é\n\u2028"})
        log.append({"index": 1})
    with ResultLog(path, SETTINGS) as log:
        assert log.done == {4, 1}
        assert log.torn_bytes == 0
        with pytest.raises(FileRefused, match="prompt 4 already has a result"):
            log.append({"index": 4})
    assert lines(path) == [{"index": 4, "text": "é\n\u2028"}, {"index": 1}]


def test_every_cut_of_the_last_line_is_repaired(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultLog(path, SETTINGS) as log:
        log.append({"index": 0, "text": "whole"})
        log.append({"index": 1, "text": "töm"})
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with ResultLog(path, SETTINGS) as log:
            assert log.done == ({0} if size >= first else set())
            assert path.read_bytes() == (content[:first] if size >= first else b"")
            assert log.torn_bytes == (size - first if size >= first else size)


def test_a_file_of_unknown_origin_is_left_unchanged(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"index": 0}\n')
    path.with_name("out.jsonl.run").mkdir()
    for settings, words in ((None, "not written by this command"), ("{}", "for other settings")):
        if settings is not None:
            (path.with_name("out.jsonl.run") / "run.json").write_text(settings)
        with pytest.raises(FileRefused, match=words):
            ResultLog(path, SETTINGS, overwrite=settings is None)
    assert path.read_text() == '{"index": 0}\n'


def test_damage_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultLog(path, SETTINGS) as log:
        log.append({"index": 0})
    with path.open("a") as file:
        file.write("garbage\n")
    with pytest.raises(FileRefused, match="line 2 is not a result"):
        ResultLog(path, SETTINGS)


def test_a_job_interrupted_before_its_first_result_leaves_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyError), ResultLog(path, SETTINGS):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with ResultLog(path, SETTINGS) as log:
        log.append({"index": 0})
    with pytest.raises(KeyError), ResultLog(path, SETTINGS):
        raise KeyError
    assert lines(path) == [{"index": 0}] and path.with_name("out.jsonl.run").is_dir()


def test_a_full_disk_keeps_finished_results(tmp_path):
    """The file size limit interrupts a write, as a full disk does."""
    path = tmp_path / "out.jsonl"
    full = pytest.raises(OSError, match=r"2 finished prompts are kept.*out\.jsonl")
    with limited(300), ResultLog(path, {}) as log, full:
        for index in range(9):
            log.append({"index": index, "text": "x" * 100})
    assert path.stat().st_size == 300
    with ResultLog(path, {}) as log:
        assert log.done == {0, 1} and log.torn_bytes > 0
        log.append({"index": 2})
    assert [line["index"] for line in lines(path)] == [0, 1, 2]


def test_invalid_output_paths(tmp_path):
    with pytest.raises(FileRefused, match="no folder"):
        ResultLog(tmp_path / "none" / "out.jsonl", SETTINGS)
    with pytest.raises(FileRefused, match="not a regular file"):
        ResultLog(tmp_path, SETTINGS)


def test_a_fingerprint_covers_both_ends_of_every_file(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"h" * 200_000 + b"t")
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("not part of it")
    assert fingerprint(tmp_path) == before
    for content in (b"H" + b"h" * 199_999 + b"t", b"h" * 200_000 + b"T", b"h" * 199_999 + b"t"):
        weights.write_bytes(content)
        assert fingerprint(tmp_path) != before
    weights.write_bytes(b"h" * 200_000 + b"t")
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(tmp_path) != before


def test_repeated_kills_lose_and_repeat_no_line(tmp_path):
    path, unbroken = tmp_path / "killed.jsonl", tmp_path / "unbroken.jsonl"
    generate(unbroken)
    moments = random.Random(7)
    context = multiprocessing.get_context("fork")
    kills = 0
    for attempt in range(200):
        process = context.Process(target=generate, args=(path, 0.002))
        process.start()
        # increasingly late: starting a process is slow on a busy machine or from a large process
        process.join(moments.uniform(0.005, 0.06) * (1 + attempt / 4))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
    else:
        pytest.fail("the job never finished")
    assert kills >= 2, "the kills came too late to test anything"
    assert sorted(lines(path), key=lambda r: r["index"]) == sorted(
        lines(unbroken), key=lambda r: r["index"]
    )
