import hashlib
import json
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors
import torch
from support.eagle import Eagle3
from support.random_heads import random_heads, write, write_sharded

import vllm_medusa
from vllm_medusa.heads import files
from vllm_medusa.heads.checkpoint import load_heads, peek_heads
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.offline.engine import medusa_config

SIZES = {"hidden_size": 8, "vocab_size": 20}


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle ran code')",))


def saved(value):
    return lambda path: torch.save(value, path)


def truncated(path):
    write(path, random_heads(2, 1).spelled("vllm"))
    path.write_bytes(path.read_bytes()[:-10])


def written(content):
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "put", "message"),
    [
        ("medusa_lm_head.pt", saved({"0.0.linear.weight": Payload()}), "not a file of plain tens"),
        ("medusa_lm_head.pt", written(pickle.dumps(Payload(), protocol=2)), "not a file of plain"),
        *(
            (name, written(content), "is not a")
            for name in ("medusa_lm_head.pt", "model.safetensors")
            for content in (b"", b"nothing of the kind", b"\x80\x02}", b"PK\x03\x04?")
        ),
        ("medusa_lm_head.pt", saved([torch.zeros(1)]), "must hold a state dict"),
        ("medusa_lm_head.pt", saved({"0.0.linear.weight": torch.zeros(1), "e": 3}), "a state dict"),
        ("model.safetensors", truncated, "is not a complete safetensors file"),
        (
            "model.safetensors",  # the target itself
            lambda path: write(path, {"model.norm.weight": torch.zeros(8)}),
            r"holds no Medusa head.*Is this a target without MTP\?",
        ),
        ("notes.txt", written(b""), r"none of medusa_lm_head\.safetensors, .*it holds notes\.txt"),
    ],
)
def test_other_files_are_refused_and_run_no_code(name, put, message, tmp_path):
    put(tmp_path / name)
    with pytest.raises(HeadsError, match=message):
        peek_heads(tmp_path)


@pytest.mark.parametrize("source", ["./no/such", "no/such/folder", "heads.d/../x", "~/no such"])
def test_neither_path_nor_hub_name(source):
    with pytest.raises(HeadsError, match="no such file or folder, and not a hub name"):
        peek_heads(source)


def test_a_local_folder_has_no_revision(tmp_path):
    write(tmp_path / "medusa_lm_head.pt", random_heads(2, 1).spelled("v1"))
    with pytest.raises(HeadsError, match="'main' was set for the local"):
        peek_heads(tmp_path, revision="main")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_invalid_configs(text, tmp_path):
    write(tmp_path / "medusa_lm_head.pt", random_heads(2, 1).spelled("v1"))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HeadsError, match=r"config\.json .*JSON"):
        peek_heads(tmp_path)


def test_invalid_indices(tmp_path):
    tensors = random_heads(2, 1).spelled("v1", "medusa_head.")
    index = "model.safetensors.index.json"
    write_sharded(tmp_path, {"a.safetensors": tensors}, index)
    places = json.loads((tmp_path / index).read_text())["weight_map"]
    third = ("0.linear.weight", "0.linear.bias", "1.weight")
    places |= {f"medusa_head.2.{name}": "a.safetensors" for name in third}
    for document, message in (
        ({"weight_map": places}, r"a\.safetensors lacks 'medusa_head\.2\.0\.linear\.bias'"),
        (
            {"weight_map": places | {"medusa_head.2.1.weight": "b.safetensors"}},
            r"lists 'b\.safetensors', which is missing",
        ),
        ({}, "has no 'weight_map'"),
    ):
        (tmp_path / index).write_text(json.dumps(document))
        with pytest.raises(HeadsError, match=message):
            peek_heads(tmp_path)


def test_reading_the_config_reads_no_weight(tmp_path, monkeypatch):
    """A header is enough: no safetensors weights are read, and pickles are memory-mapped."""
    write(tmp_path / "st" / "model.safetensors", random_heads(2, 1).spelled("vllm"))
    write(tmp_path / "pt" / "medusa_lm_head.pt", random_heads(2, 1).spelled("v1"))

    opened = safetensors.safe_open

    @contextmanager
    def header_only(*args, **kwargs):
        with opened(*args, **kwargs) as file:

            def header(name):
                part = file.get_slice(name)
                return SimpleNamespace(get_shape=part.get_shape, get_dtype=part.get_dtype)

            yield SimpleNamespace(keys=file.keys, metadata=file.metadata, get_slice=header)

    monkeypatch.setattr(files, "safe_open", header_only)
    assert peek_heads(tmp_path / "st").num_heads == 2
    with pytest.raises(TypeError, match="not subscriptable"):
        load_heads(tmp_path / "st", **SIZES)

    mapped = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: mapped.append(k["mmap"]) or load(*a, **k))
    assert peek_heads(tmp_path / "pt").num_heads == 2
    assert mapped and all(mapped)


class Hub:
    """A fake hub that serves a folder, file by file, and records requests."""

    def __init__(self, repository, cache):
        self.repository, self.cache, self.requested = repository, cache, []

    def __call__(self, name, *, revision, allow_patterns):
        self.requested.append((name, revision))
        for pattern in allow_patterns:
            source = self.repository / pattern
            if source.is_file():
                self.cache.mkdir(exist_ok=True)
                (self.cache / pattern).write_bytes(source.read_bytes())
        return str(self.cache)


def test_hub_names_download_only_what_the_heads_need(tmp_path, monkeypatch):
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    tensors = random_heads(2, 1).spelled("v1", "medusa_head.")
    shards = {"big-1.bin": {"model.norm.weight": torch.ones(8)}, "big-2.bin": tensors}
    write_sharded(repository, shards, "pytorch_model.bin.index.json", {"medusa_num_heads": 2})
    hub = Hub(repository, cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    info = peek_heads("someone/medusa-7b", revision="v3")
    assert (info.format, info.num_heads) == ("full", 2)
    assert set(hub.requested) == {("someone/medusa-7b", "v3")}
    downloaded = {path.name for path in cache.iterdir()}
    assert downloaded == {"config.json", "pytorch_model.bin.index.json", "big-2.bin"}


def test_the_heads_are_requested_first(tmp_path, monkeypatch):
    tensors = random_heads(2, 1).spelled("v1")
    for name in ("medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"):
        write(tmp_path / "repository" / name, tensors)
    hub = Hub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert load_heads("someone/heads", **SIZES)[1].format == "v1"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["medusa_lm_head.safetensors"]


def test_an_eagle_drafter_on_the_hub_is_recognized(tmp_path, monkeypatch):
    Eagle3(torch.zeros(512, 64), torch.arange(512), (1, 2, 3)).save(tmp_path / "repository")
    hub = Hub(tmp_path / "repository", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    config = medusa_config("someone/eagle3", {"revision": "v3"})
    assert (config["method"], config["tree"]) == ("eagle3", "dynamic")
    assert set(hub.requested) == {("someone/eagle3", "v3")}


def test_without_a_hub_a_name_is_asked_for_once(monkeypatch):
    requests = []

    def unreachable(name, **_):
        requests.append(name)
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert medusa_config("someone/heads") == {"method": "medusa", "model": "someone/heads"}
    assert requests == ["someone/heads"]


def test_offline_mode_is_reported(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HeadsError, match=r"'someone/heads'.*not a local folder.*pass the folder"):
        peek_heads("someone/heads")


def test_an_entry_states_the_origin_of_the_heads(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"one")
    entry = provenance(["vllm-medusa", "train"], [tmp_path / "a.jsonl"])
    assert json.loads(json.dumps(entry)) == entry
    assert entry["command"] == ["vllm-medusa", "train"]
    digest = hashlib.sha256(b"one").hexdigest()
    assert entry["data"] == [{"file": "a.jsonl", "sha256": digest, "bytes": 3}]
    assert entry["versions"]["vllm-medusa"] == vllm_medusa.__version__
    assert "torch" in entry["versions"]
    assert entry["time"].endswith("+00:00")
