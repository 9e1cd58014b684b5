import hashlib
import json

import vllm_medusa
from vllm_medusa.heads.provenance import provenance


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
