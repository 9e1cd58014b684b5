"""Inspection reports a checkpoint's type, its anomalies, and whether it fits."""

import json

import pytest
import torch
from support.random_heads import HIDDEN, VOCAB, random_heads, write

from vllm_medusa.heads.checkpoint import update_config
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.inspection import inspect_heads


@pytest.fixture
def target(tmp_path):
    """Write a target; ``changes`` apply to its config."""

    def make(name="target", **changes):
        tensors = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
            "model.layers.0.mlp.up_proj.weight": torch.randn(4, HIDDEN),
        }
        config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1} | changes
        write(tmp_path / name / "model.safetensors", tensors, config)
        return tmp_path / name

    return make


def verdicts(found):
    return {check.name: check.verdict for check in found.checks}


def test_sizes(tmp_path):
    plain = random_heads(3, 2, dtype=torch.bfloat16)
    path = write(tmp_path / "medusa_lm_head.pt", plain.spelled("v1"), {"medusa_num_heads": 3})
    found = inspect_heads(tmp_path)
    parameters = 3 * (2 * (HIDDEN * HIDDEN + HIDDEN) + VOCAB * HIDDEN)
    assert (found.damage, found.checks, found.fits) == ([], [], True)
    document = json.loads(json.dumps(found.to_dict()))
    assert (document["parameters"], document["bytes"]) == (parameters, 2 * parameters)
    assert document["dtypes"] == {"bfloat16": 15}
    assert document["files"] == {"medusa_lm_head.pt": path.stat().st_size}
    assert (document["format"], document["num_heads"], document["num_layers"]) == ("v1", 3, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damage(value, tmp_path):
    plain = random_heads()
    plain.layers[1][0][1][3] = value
    write(tmp_path / "medusa_lm_head.pt", plain.spelled("v1"))
    found = inspect_heads(tmp_path)
    assert not found.fits
    assert found.damage == [
        "'1.0.linear.bias' holds NaN or infinity: the training diverged. Retrain it"
    ]


def test_its_own_target(tmp_path, target):
    write(tmp_path / "heads" / "model.safetensors", random_heads().spelled("vllm"), {})
    heads, folder = tmp_path / "heads", target()
    found = inspect_heads(heads, folder)
    assert verdicts(found) == {
        "hidden size": "fits",
        "vocabulary": "fits",
        "fingerprint": "unknown",
    }
    assert found.fits
    update_config(heads, target=target_fingerprint(folder), tree=[[0], [0, 0]])
    found = inspect_heads(heads, folder)
    assert set(verdicts(found).values()) == {"fits"}
    assert found.tree.num_draft_tokens == 2
    for name, changes in (
        ("fingerprint", {}),
        ("hidden size", {"hidden_size": 16}),
        ("vocabulary", {"vocab_size": 21}),
        ("vocabulary", {"vocab_size": 19}),
    ):
        found = inspect_heads(heads, target("other", **changes))
        assert verdicts(found)[name] == "does not fit" and not found.fits


@pytest.mark.parametrize(
    ("tree", "verdict", "words"),
    [
        ([[0], [0, 0], [0, 0, 0]], "fits", "depth 3 of 3 heads"),
        ({"chain": 4}, "does not fit", "depth 4, but there are 3 heads"),
        ([[20]], "does not fit", "rank 20, for 20 tokens"),
        ([[0, 0]], "does not fit", "is not valid"),
        ("no such preset", "does not fit", "is not valid"),
    ],
)
def test_trees(tree, verdict, words, tmp_path):
    config = {"medusa": {"tree": tree}}
    write(tmp_path / "medusa_lm_head.pt", random_heads().spelled("v1"), config)
    (check,) = inspect_heads(tmp_path).checks
    assert (check.verdict, words in check.text) == (verdict, True), check
    assert inspect_heads(tmp_path).fits is (verdict == "fits")
