import hashlib
import json
import subprocess

import vllm_medusa
from vllm_medusa.heads.provenance import provenance


def test_an_entry_says_what_made_the_heads(tmp_path, monkeypatch):
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

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        done = subprocess.run(["git", *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    assert provenance([])["git"] is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "one")
    assert provenance([])["git"] == {"revision": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "a").write_text("2")
    assert provenance([])["git"]["changed"]
