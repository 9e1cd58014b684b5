"""`vllm-medusa train --method medusa-2` from records to a new target, on a tiny random model."""

import json
import math
import os
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from support.commands import die, killed, run, said
from support.models import HIDDEN, VOCAB, save_model
from transformers import AutoModelForCausalLM

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.offline.records import load_records, split_heldout
from vllm_medusa.training.medusa2 import DEGRADED, MODEL
from vllm_medusa.training.quality import QualityMeter
from vllm_medusa.training.target import Target

K = 2
OPTIONS = (
    *("--num-heads", str(K), "--epochs", "6", "--batch-tokens", "64", "--learning-rate", "2e-2"),
    *("--labels", "tokens", "--precision", "float32", "--save-dtype", "float32"),
    *("--lora-rank", "4", "--heads-weight", "0.2", "--joint-tokens", "60", "--pass-tokens", "40"),
    *("--backbone-rate", "2e-3", "--measure-every", "3", "--device", "cpu"),
)
LOOSE = ("--max-kl", "1", "--max-perplexity-ratio", "2")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("m2"), "Llama", initializer_range=0.1)
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    with path.open("w") as file:
        for index in range(14):
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(3, 9, (15 + index % 5,), generator=generator).tolist()
            row = {"index": index, "token_ids": [index + 20, *ids], "generated": [[3, len(ids)]]}
            file.write(json.dumps(row | {"temperature": 1.0}) + "\n")
    return path


def train(source: str, data: Path, output: Path, *more: str) -> int:
    command = ["train", source, "--method", "medusa-2", "--drafter", "medusa", "--data", data]
    return run(*command, "--output", output, "--heldout-share", "0.2", *OPTIONS, *more)


def config_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "config.json").read_text())["medusa"]


@pytest.fixture(scope="module")
def done(source, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("done") / "heads"
    assert train(source, data, output, *LOOSE) == 0
    return output


def test_a_new_target_and_heads_for_it(source, data, done, capsys):
    training = config_of(done)["training"]
    assert config_of(done)["target"]["sha256"] == target_fingerprint(done / MODEL)["sha256"]
    assert config_of(done)["target"]["sha256"] != target_fingerprint(source)["sha256"]
    assert training["joint"]["lora_rank"] == 4 and training["joint_steps"] > 0
    warm_up = [training[stage]["warmup_steps"] for stage in ("recipe", "joint")]
    assert warm_up == [50, 20], "each stage has its own log"
    assert training["target"]["sha256"] == target_fingerprint(source)["sha256"]  # it came from
    assert not training["degraded"] and 0 < training["quality"]["kl"] < 0.1
    stated = json.loads((done / MODEL / "config.json").read_text())["medusa_2"]
    assert stated["quality"] == training["quality"] and stated["degraded"] is False
    left = sorted(path.name for path in (done / "training").iterdir())
    assert left == ["curves.png", "heldout.jsonl", "log.jsonl", "run.json", "warm-up.jsonl"]
    assert sorted(p.name for p in done.iterdir()) == [
        *("config.json", "model.safetensors", MODEL, "training")
    ]
    capsys.readouterr()
    assert train(source, data, done, *LOOSE) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_reported_figures_are_measured_on_the_merged_files(source, data, done):
    """Recompute everything in plain transformers, text by text."""
    training = config_of(done)["training"]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (source, done / MODEL)
    ]
    assert json.loads((done / MODEL / "config.json").read_text())["dtype"] == "bfloat16"
    weight = models[1].get_output_embeddings().weight
    heads, _ = load_heads(done, hidden_size=HIDDEN, vocab_size=VOCAB)
    heads.store_lm_head(weight)
    _, heldout = split_heldout(load_records(data)[0], 0.2)
    right = [[] for _ in range(K)]
    kl = []
    nats = [[], []]
    for text in heldout:
        ids = torch.tensor([text.token_ids])
        with torch.no_grad():
            old, new = (m(ids, output_hidden_states=True) for m in models)
            guesses = heads.compute_logits(heads(new.hidden_states[-1][0])).argmax(-1)  # [T, K]
        start, end = text.generated[0]
        for t in range(start - 1, end - 1):
            p, q = (out.logits[0, t].log_softmax(0) for out in (old, new))
            kl.append(float((p.exp() * (p - q)).sum()))
            for place, row in enumerate((p, q)):
                nats[place].append(-float(row[ids[0, t + 1]]))
            for head in range(K):
                if t + head + 2 < end:
                    right[head].append(float(guesses[t, head] == ids[0, t + head + 2]))

    quality = training["quality"]
    assert quality["num_tokens"] == len(kl)
    assert quality["kl"] == pytest.approx(fmean(kl), rel=1e-3, abs=1e-6)
    for name, values in zip(("before", "after"), nats, strict=True):
        expected = float(torch.tensor(fmean(values)).exp())
        assert quality[f"perplexity_{name}"] == pytest.approx(expected, rel=1e-4)
    top1 = [top[0] for top in training["heldout"]["top"]]
    assert top1 == pytest.approx([fmean(head) for head in right], abs=1e-3)
    assert max(training["heldout"]["loss"]) < 5.5  # untrained heads: about log(512) = 6.2


def test_a_degraded_target_is_kept_and_the_command_fails(source, data, tmp_path, capsys):
    output, bounds = tmp_path / "heads", ("--max-kl", "1e-9")
    assert train(source, data, output, *bounds) == 1
    assert "degraded: KL(original || new) per token is" in said(capsys)
    assert (output / DEGRADED / "model.safetensors").exists() and not (output / MODEL).exists()
    training = config_of(output)["training"]
    assert training["degraded"] and len(training["shortfalls"]) == 1
    assert json.loads((output / DEGRADED / "config.json").read_text())["medusa_2"]["degraded"]
    assert train(source, data, output, *bounds) == 1  # nor does the second run succeed silently


@pytest.mark.parametrize("diverged", ["quality", "states"])
def test_a_target_that_diverged_is_kept_as_degraded(
    diverged, source, data, done, tmp_path, monkeypatch, capsys
):
    if diverged == "quality":
        bad = {"num_tokens": 9, "perplexity_before": 2.0, "kl": math.nan}
        bad |= {"perplexity_after": math.inf, "perplexity_ratio": math.inf}
        monkeypatch.setattr(QualityMeter, "result", lambda _: bad)
    else:
        load = Target.load

        def loaded(path, **options):
            target = load(path, **options)
            if Path(path).name == "merged":
                target.model.get_input_embeddings().weight.fill_(math.nan)
            return target

        monkeypatch.setattr(Target, "load", loaded)
    output = tmp_path / "heads"
    options = (*LOOSE, "--start-heads", str(done), "--joint-tokens", "9999")
    assert train(source, data, output, *options) == 1
    text = said(capsys)
    training = config_of(output)["training"]
    assert training["degraded"] and (output / DEGRADED / "model.safetensors").exists()
    stated = json.loads((output / DEGRADED / "config.json").read_text(), parse_constant=pytest.fail)
    assert stated["medusa_2"]["shortfalls"] == training["shortfalls"]
    if diverged == "quality":
        assert training["quality"]["kl"] is training["quality"]["perplexity_after"] is None
        assert "not finite" in text and "KL(original || new) per token is nan" in text
    else:
        assert "The new target diverged" in text and "dtype" not in text
    assert train(source, data, output, *options) == 1


def test_refused_before_anything_is_written(source, data, tmp_path, capsys):
    for options, words in (
        (("--heldout-share", "0"), "its quality must be measured: pass --heldout"),
        (("--max-perplexity-ratio", "0.5"), "ratio: '0.5' is not allowed; input should"),
        (("--start-heads", "h", "--lm-heads", "own"), "--lm-heads is for new heads"),
        (("--start-heads", "h", "--draft-vocab", "9"), "--draft-vocab is for new heads"),
        (("--backbone-rate", "0"), "--backbone-rate: '0' is not allowed; input should be greater"),
        (("--dtype", "float16"), "Train it with --dtype bfloat16"),
    ):
        assert train(source, data, tmp_path / "heads", *options) == 2
        assert words in said(capsys)
        assert not (tmp_path / "heads").exists()


def test_a_quantized_target_is_refused(source, data, tmp_path, capsys):
    folder = tmp_path / "quantized"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert train(str(folder), data, tmp_path / "heads") == 2
    assert "stored quantized" in said(capsys) and not (tmp_path / "heads").exists()


class Syncs:
    """Counts `os.fsync`, which all important files use, and dies at one of them."""

    def __init__(self, die_at: int = 0) -> None:
        self.count, self.die_at, self.sync = 0, die_at, os.fsync

    def __call__(self, descriptor: int) -> None:
        self.count += 1
        if self.count == self.die_at:
            die()
        self.sync(descriptor)


def files(output: Path) -> dict[str, Any]:
    names = ("model.safetensors", f"{MODEL}/model.safetensors")
    log = (output / "training" / "log.jsonl").read_text().splitlines()
    return {name: (output / name).read_bytes() for name in names} | dict(enumerate(log))


def test_a_run_killed_at_any_write_ends_with_the_same_files(
    source, data, done, tmp_path, monkeypatch
):
    """From the run's settings over both stages' states to the merged model."""
    whole = Syncs()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", whole)
        assert train(source, data, tmp_path / "whole", *LOOSE) == 0
    assert files(tmp_path / "whole") == files(done)
    assert whole.count >= 12
    for share in (0.1, 0.4, 0.65, 0.95):
        output = tmp_path / str(share)

        def dying(die_at=int(share * whole.count), output=output):
            os.fsync = Syncs(die_at)
            train(source, data, output, *LOOSE)

        assert killed(dying)
        assert train(source, data, output, *LOOSE) == 0
        assert files(output) == files(done)
