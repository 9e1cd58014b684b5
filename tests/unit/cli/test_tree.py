import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run, said
from support.observed import observed

from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.walks import walk_taus, walked_tree
from vllm_medusa.heads.files import digest_heads, find_checkpoint


@pytest.fixture
def heads(heads):
    """Heads with a calibration in which head 1 is right only after the second choice of head 0."""
    rng = np.random.default_rng(0)
    ranks = rng.choice([0, 1, 7], (400, 5), p=[0.5, 0.3, 0.2])
    ranks[:, 1] = np.where(ranks[:, 0] == 1, 0, 7)
    source = {"heads": digest_heads(find_checkpoint(heads))}
    observed(ranks, [50] * 8, 4, temperature=0.7, source=source).save(heads)
    return heads


def medusa(heads: Path) -> dict[str, Any]:
    return json.loads((heads / "config.json").read_text())["medusa"]


def test_the_best_tree_is_in_the_config(heads):
    assert run("tree", heads, "-n", 6) == 0
    observations = Observations.load(heads)
    expected = walked_tree(observations.texts(), 6, 4)
    found = medusa(heads)
    assert found["tree"] == [list(path) for path in expected]
    taus = walk_taus(observations.texts(), expected, range(1, 7))
    assert found["tree_tokens_per_step"] == [round(tau, 4) for tau in taus]
    assert found["provenance"][-1]["data"][0]["file"] == "calibration.safetensors"
    assert found["tree"].index([1, 0]) == 2, "averages of the heads would be misleading here"


def test_fewer_nodes_than_requested(heads, capsys):
    replace(Observations.load(heads), num_ranks=1).save(heads)
    assert run("tree", heads) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the tree has 5, from 5 heads with 1 choices each" in said
    assert len(medusa(heads)["tree"]) == 5


def test_changed_or_uncalibrated_heads(heads, capsys):
    content = bytearray((heads / "model.safetensors").read_bytes())
    content[-5000] ^= 1
    (heads / "model.safetensors").write_bytes(content)
    assert run("tree", heads) == 2
    assert "have changed since they were calibrated" in said(capsys)
    (heads / "calibration.safetensors").unlink()
    assert run("tree", heads) == 2
    assert "vllm-medusa calibrate TARGET" in capsys.readouterr().err
