"""`vllm-medusa train` as run by a user: checked first, killed, resumed, distributed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.assets import HEADS
from support.commands import run, said
from support.models import save_model

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.offline.records import load_records
from vllm_medusa.training import draft_vocab, train, workers
from vllm_medusa.training.target import Target

Data = tuple[str, Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A target, and records of random tokens as if sampled by the target."""
    folder = tmp_path_factory.mktemp("data")
    target = save_model(folder / "target", "Qwen2", tie_word_embeddings=True, head_dim=None)
    generator = torch.Generator().manual_seed(0)
    with (folder / "records.jsonl").open("w") as file:
        for index in range(24):
            ids = torch.randint(3, 512, (40,), generator=generator).tolist()
            line = {"index": index, "token_ids": ids, "generated": [[6, 20], [22, 40]]}
            file.write(json.dumps(line | {"temperature": 0.7}) + "\n")
    return target, folder / "records.jsonl"


def arguments(data: Data, output: Path, *more: str) -> list[str]:
    return [
        *("train", data[0], "--data", str(data[1]), "--output", str(output)),
        *("--device", "cpu", "--precision", "float32", "--heldout-share", "0.1"),
        *("--num-heads", "2", "--batch-tokens", "32", "--epochs", "4", "--measure-every", "8"),
        *more,
    ]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_medusa.cli", *command],
        env={**os.environ, **environment, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_when(process: subprocess.Popen[str], there: Callable[[], bool]) -> None:
    while not there():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "heads"
    assert run(*arguments(data, output)) == 0
    return output


def test_held_out_texts_are_stored_with_the_heads(trained, data):
    heldout, _ = load_records(trained / "training" / "heldout.jsonl")
    known = {record.token_ids: record for record in load_records(data[1])[0]}
    assert len(heldout) == 2
    for record in heldout:
        source = known[record.token_ids]
        assert record == replace(source, line=record.line)


def test_the_heads_state_their_origin(trained):
    heads, info = load_heads(trained, hidden_size=64, vocab_size=512)
    assert heads.num_heads == 2 and heads.shared_lm_head and info.dtype == torch.bfloat16
    about = json.loads((trained / "config.json").read_text())["medusa"]
    assert about["target"]["hidden_size"] == 64 and len(about["target"]["sha256"]) == 64
    assert about["training"]["recipe"]["learning_rate"] > 0
    assert len(about["training"]["heldout"]["top"]) == 2
    assert about["provenance"][0]["data"][0]["file"] == "records.jsonl"
    assert sorted(path.name for path in (trained / "training").iterdir()) == [
        *("curves.png", "heldout.jsonl", "log.jsonl", "run.json")
    ]
    assert (trained / "training/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_killed_while_caching_and_training_ends_the_same(data, trained, tmp_path):
    output = tmp_path / "heads"
    command = arguments(data, output)
    work = output / "training/work"
    kill_when(start(command), lambda: any(work.glob("hidden-*")))
    assert not (work / "state.pt").exists()
    kill_when(start(command), (work / "state.pt").exists)
    assert not (output / "config.json").exists() and any(work.glob("hidden-*/*.bin"))
    assert run(*command) == 0
    wanted, got = (load_file(folder / "model.safetensors") for folder in (trained, output))
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    logs = [(folder / "training/log.jsonl").read_text() for folder in (trained, output)]
    assert logs[0] == logs[1]
    assert not work.exists()


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_training_continues_from_heads(data, tmp_path, kind, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    shape = ("--drafter", kind, "--epochs", "1")
    assert run(*arguments(data, first, *shape, "--draft-vocab", "300")) == 0
    more = ("--start-heads", str(first))
    assert run(*arguments(data, second, *shape, *more, "--learning-rate", "1e-12")) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = [
        json.loads((folder / "config.json").read_text())["medusa"]["training"]["tokens"]
        for folder in (first, second)
    ]
    assert tokens[0] > 0 and tokens[1] == 2 * tokens[0]
    third = tmp_path / "third"
    assert run(*arguments(data, third, *shape, *more, "--num-heads", "3")) == 2
    assert "--num-heads is 3, but --start-heads" in said(capsys) and not third.exists()


def test_repeating_a_finished_command_does_nothing(data, trained, tmp_path, capsys):
    before = (trained / "model.safetensors").stat().st_mtime_ns
    assert run(*arguments(data, trained)) == 0
    assert "nothing to do" in capsys.readouterr().err
    other = tmp_path / "records.jsonl"  # a span that affects Medusa-2's loss and draft vocabularies
    other.write_text(data[1].read_text().replace("[[6, 20], ", "[[6, 20], [20, 21], "))
    for file, more, words in (
        (data[1], ("--seed", "9"), "recipe.seed was 0 and is now 9"),
        (data[1], ("--quantization", "8bit"), "quantization was None and is now '8bit'"),
        (other, (), "data.train was"),
    ):
        assert run(*arguments((data[0], file), trained, *more)) == 2
        assert words in said(capsys)
    assert (trained / "model.safetensors").stat().st_mtime_ns == before


def test_two_processes_train_as_one(data, trained, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        start(arguments(data, tmp_path / "heads"), RANK=rank, LOCAL_RANK=rank, **shared)
        for rank in "01"
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    logs = []
    for folder in (trained, tmp_path / "heads"):
        lines = (folder / "training/log.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    assert len(logs[0]) == len(logs[1])
    for one, two in zip(*logs, strict=True):
        assert one["step"] == two["step"]
        if "losses" in one:
            assert one["losses"] == pytest.approx(two["losses"], rel=1e-3)
        else:
            assert one["heldout"]["labels"] == two["heldout"]["labels"]
            assert one["heldout"]["loss"] == pytest.approx(two["heldout"]["loss"], rel=1e-3)


def test_refused_before_anything_is_written(data, tmp_path, capsys):
    target, records = data
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("x")
    foreign, new = '{"token_ids": [1, 600], "generated": [[0, 2]]}\n', tmp_path / "new"
    four = '{"token_ids": [4, 5, 6, 7], "generated": [[1, END]]}\n' * 3
    for name, text in {
        "bad": records.read_text() + foreign + "x\n",
        "short": four.replace("END", "2"),
        "quick": four.replace("END", "3"),
        "empty": "",
        "cut": records.read_text().replace('"temperature"', '"top_p": 0.9, "temperature"'),
        "foreign": foreign,
    }.items():
        (tmp_path / name).write_text(text)
    whole = ("--heldout-share", "0")
    for file, more, reason in (
        (records, ("--output", str(full)), "not a training run"),
        (records, ("--output", str(tmp_path / "a/b")), "no folder"),
        (tmp_path / "none", (), "no such file"),
        (full, (), f"{full}: a folder, not a file"),
        (tmp_path / "bad", (), "line 25: token_ids[1] is 600"),
        (tmp_path / "bad", (), "line 26: not JSON"),
        (tmp_path / "short", whole, "has labels for 0 heads, but 2 are requested"),
        (tmp_path / "quick", whole, "Train --num-heads 1"),
        (tmp_path / "short", (), "--heldout-share 0"),
        (tmp_path / "empty", whole, "no usable records"),
        (tmp_path / "empty", (), "no usable records"),
        (tmp_path / "foreign", (), "line 1: token_ids[1] is 600"),
        (tmp_path / "cut", (), "full distributions. Train with --labels tokens"),
        (records, ("--max-kl", "1"), "an option of --method medusa-2"),
        (records, ("--heldout", str(records)), "none of its 24 usable records"),
        (records, ("--seed", "-1"), "--seed: '-1' is not allowed; input should be greater"),
        (records, ("--warmup-steps", "-1"), "--warmup-steps: '-1' is not allowed; input"),
        (records, ("--decay", "1.5"), "--decay: '1.5' is not allowed"),
    ):
        assert run(*arguments((target, file), new, *more)) == 2, reason
        assert reason in said(capsys)
        assert not new.exists() and not (full / "training").exists()
    assert run(*arguments((str(tmp_path), records), new)) == 2
    assert str(tmp_path) in said(capsys)
    assert run(*arguments((HEADS, records), new)) == 2
    assert "Transformers is out of date. Pass a folder with the model's" in said(capsys)
    assert run(*arguments((target, tmp_path / "bad"), new, "--on-bad-line", "skip")) == 0
    assert "skipping 2 bad lines" in capsys.readouterr().err


def test_inputs_in_the_output_are_refused(data, tmp_path, capsys):
    target, records = data
    output = tmp_path / "heads"
    shutil.copytree(target, output / "target")
    (output / "training").mkdir()
    for name in ("training/run.json", "config.json"):
        (output / name).write_text("{}")
    for name in ("mine.jsonl", "training/heldout.jsonl"):
        shutil.copy(records, output / name)
    (tmp_path / "link").symlink_to(output)
    before = sorted(output.rglob("*"))
    inside = str(output / "training/heldout.jsonl")
    joint = ("--drafter", "medusa", "--method", "medusa-2")
    for source, file, more, reason in (
        (target, records, (*joint, "--start-heads", str(output)), "--start-heads"),
        (target, records, ("--heldout", inside), "--heldout"),
        (target, tmp_path / "link/mine.jsonl", ("--overwrite",), "--data"),
        (str(output / "target"), records, (), "the target"),
    ):
        assert run(*arguments((source, file), output, *more)) == 2
        text = said(capsys)
        assert f"error: {reason}" in text and "is in --output" in text
        assert sorted(output.rglob("*")) == before


def test_errors_of_other_processes_are_reported(data, tmp_path, monkeypatch, capsys):
    class Second(workers.Workers):
        def __init__(self, device):
            super().__init__(device)
            self.rank = 1

    monkeypatch.setattr(train, "Workers", Second)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads/new").touch()  # just created by the main process
    nothing = tmp_path / "none.jsonl"
    assert run(*arguments((data[0], nothing), tmp_path / "heads")) == 2
    text = said(capsys)
    assert f"error: in process 1: {nothing}: no such file" in text


def test_a_draft_vocabulary_is_chosen_for_a_large_one(data, tmp_path, capsys, monkeypatch):
    for name, value in (("LARGEST", 300), ("SMALLEST", 64), ("MULTIPLE", 64)):  # of 512 tokens
        monkeypatch.setattr(draft_vocab, name, value)
    quick = ("--num-heads", "1", "--epochs", "1", "--drafter", "hydra")
    assert run(*arguments(data, tmp_path / "few", *quick)) == 0
    assert "draft vocabulary: 300 of 512 tokens" in said(capsys)
    tensors = load_file(tmp_path / "few" / "model.safetensors")
    (end,) = Target.load(data[0]).end_tokens
    assert tensors["token_map"].shape == (300,) and end in tensors["token_map"]
    assert not any(name.startswith("hydra_lm_head") for name in tensors)
    saved = json.loads((tmp_path / "few" / "config.json").read_text())["medusa"]["training"]
    assert saved["draft_vocab"]["size"] == 300
    assert 0.3 < saved["draft_vocab"]["heldout_coverage"] < saved["draft_vocab"]["coverage"] < 1
    assert run(*arguments(data, tmp_path / "all", *quick, "--draft-vocab", "0")) == 0
    assert "draft vocabulary" not in said(capsys)
    assert "token_map" not in load_file(tmp_path / "all" / "model.safetensors")


def test_a_cache_can_be_kept_limited_and_reused(data, tmp_path, capsys):
    cache = ("--cache", str(tmp_path / "cache"), "--epochs", "1")
    cache += ("--num-heads", "1", "--lm-heads", "own", "--draft-vocab", "300")
    assert run(*arguments(data, tmp_path / "a", *cache, "--cache-gb", "0.0001")) == 0
    assert "computed in every epoch" in said(capsys)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.bin")}
    assert files and sum(file.stat().st_size for file in files) <= 100_000
    assert run(*arguments(data, tmp_path / "b", *cache, "--cache-gb", "0.0001")) == 0
    assert files == {file: file.stat().st_mtime_ns for file in files}
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["token_map"].shape == (300,)
    target = Path(shutil.copytree(data[0], tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    other, bound = (str(target), data[1]), ("--cache-gb", "0.0001")
    assert run(*arguments(other, tmp_path / "a", *cache, *bound)) == 2
    text = said(capsys)
    assert f"target_config.rms_norm_eps was {config['rms_norm_eps']} and is now 0.5" in text
    assert run(*arguments(other, tmp_path / "c", *cache, *bound)) == 0
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 2 * len(files)
