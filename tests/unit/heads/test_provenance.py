import hashlib
import json
import subprocess

import vllm_medusa
from vllm_medusa.heads.provenance import provenance


def test_an_entry_states_the_origin_of_the_heads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.jsonl").write_bytes(b"two")
    (tmp_path / "data" / "a.jsonl").write_bytes(b"one")
    entry = provenance(["vllm-medusa", "train"], [tmp_path / "data", tmp_path / "data" / "b.jsonl"])
    assert json.loads(json.dumps(entry)) == entry
    assert entry["command"] == ["vllm-medusa", "train"]
    found = [(file["file"], file["bytes"]) for file in entry["data"]]
    assert found == [("a.jsonl", 3), ("b.jsonl", 3), ("b.jsonl", 3)]
    assert entry["data"][0]["sha256"] == hashlib.sha256(b"one").hexdigest()
    assert entry["versions"]["vllm-medusa"] == vllm_medusa.__version__
    assert "torch" in entry["versions"]
    assert entry["time"].endswith("+00:00")
    assert entry["git"] is None


def test_the_git_revision_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    assert provenance([])["git"] is None  # no commit yet
    identity = ["git", "-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run([*identity, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    found = provenance([])["git"]
    assert len(found["revision"]) == 40 and not found["changed"]
