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


def test_a_dry_run_changes_nothing(heads, capsys):
    replace(Observations.load(heads), num_ranks=1).save(heads)
    before = (heads / "config.json").read_bytes()
    assert run("tree", heads, "--dry-run") == 0
    shown = capsys.readouterr()
    assert "dry run" in shown.out
    assert "there are 5 of 5 heads with 1 choices each" in " ".join(shown.err.split())
    assert (heads / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "tree.txt"], "not a supported picture format"),
        (["--output", "nowhere/tree.json"], "no folder nowhere"),
    ],
)
def test_invalid_options_are_refused(heads, capsys, arguments, message):
    before = (heads / "config.json").read_bytes()
    assert run("tree", heads, *arguments) == 2
    assert message in said(capsys)
    assert (heads / "config.json").read_bytes() == before


def test_only_a_tree_written_by_this_command_is_replaced(heads, capsys):
    out = heads.parent / "tree.json"
    out.touch()
    assert run("tree", heads, "-n", 3, "--output", out) == 0
    assert run("tree", heads, "-n", 4, "--output", out) == 0
    assert len(json.loads(out.read_text())["tree"]) == 4
    for name, text in {
        "precious.txt": "notes",
        "mine.json": '{"tree": [[0], [0, 0]], "source": "my own"}',
        "paths.json": "[[0], [0, 0]]",
        "costs.json": '{"tree": [[7, 7]], "source": {"algorithm": "walk"}}',
    }.items():
        (heads.parent / name).write_text(text)
    others = [file for file in heads.parent.iterdir() if file.is_file() and file != out]
    for file in [*others, *heads.iterdir()]:
        before = file.read_bytes()
        assert run("tree", heads, "-n", 3, "--output", file) == 2
        assert f"{file} exists and holds no tree" in capsys.readouterr().err
        assert file.read_bytes() == before
    assert len(medusa(heads)["tree"]) == 4, "unchanged"


def test_changed_or_uncalibrated_heads(heads, capsys):
    content = bytearray((heads / "model.safetensors").read_bytes())
    content[-5000] ^= 1
    (heads / "model.safetensors").write_bytes(content)
    assert run("tree", heads) == 2
    assert "have changed since they were calibrated" in said(capsys)
    (heads / "calibration.safetensors").unlink()
    assert run("tree", heads) == 2
    assert "vllm-medusa calibrate TARGET" in capsys.readouterr().err
