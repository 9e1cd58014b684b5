import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run, said
from support.observed import observed

from vllm_medusa.calibration.budgets import Limits, StepCost, build_tree, curve
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.search import walk_taus
from vllm_medusa.heads.files import digest_heads, find_checkpoint

ASSETS = Path(__file__).parents[3] / "tests" / "assets"


@pytest.fixture
def heads(tmp_path):
    """Heads with a calibration in which head 1 is right only after the second choice of head 0."""
    folder = tmp_path / "heads"
    shutil.copytree(ASSETS / "heads", folder)
    rng = np.random.default_rng(0)
    ranks = rng.choice([0, 1, 7], (400, 5), p=[0.5, 0.3, 0.2])
    ranks[:, 1] = np.where(ranks[:, 0] == 1, 0, 7)
    source = {"heads": digest_heads(find_checkpoint(folder))}
    observed(ranks, [50] * 8, 4, temperature=0.7, source=source).save(folder)
    return folder


def medusa(heads: Path) -> dict[str, Any]:
    found = json.loads((heads / "config.json").read_text())["medusa"]
    return found


@pytest.mark.parametrize("algorithm", ["walk", "independence"])
def test_the_tree_in_the_config_is_the_algorithms(heads, algorithm):
    assert run("tree", heads, "-n", 6, "--algorithm", algorithm) == 0
    observations = Observations.load(heads)
    expected = build_tree(algorithm, observations.texts(), Limits(6, 4))
    found = medusa(heads)
    assert found["tree"] == [list(path) for path in expected]
    taus = walk_taus(observations.texts(), expected, range(1, 7))
    assert found["tree_tokens_per_step"] == [round(tau, 4) for tau in taus]
    assert found["tree_source"]["algorithm"] == algorithm
    assert found["provenance"][-1]["data"][0]["file"] == "calibration.safetensors"
    first = {"walk": [1, 0], "independence": [0, 0]}[algorithm]
    assert found["tree"].index(first) == 2, "independence misleads here"


def test_a_dry_run_changes_nothing(heads, capsys):
    before = (heads / "config.json").read_bytes()
    assert run("tree", heads, "--dry-run", "--max-depth", 2, "--max-rank", 2) == 0
    shown = capsys.readouterr()
    assert "dry run" in shown.out
    assert "finds 6 within depth 2 and 2 choices" in " ".join(shown.err.split())
    assert (heads / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("ranks", "nodes", "rows"), [(4, 16, [1, 2, 4]), (3, 16, [1, 2, 3]), (4, 3, [1, 2, 3])]
)
def test_sizes_shown_end_with_the_tree(heads, capsys, ranks, nodes, rows):
    """However many nodes were asked for."""
    options = ["--max-depth", 1, "--max-rank", ranks, "-n", nodes]
    assert run("tree", heads, "--dry-run", *options) == 0
    lines = map(str.split, capsys.readouterr().out.splitlines())
    table = [line for line in lines if line and line[0].isdigit() and line[1] != "nodes:"]
    assert [int(line[0]) for line in table] == rows
    assert all(float(line[1]) > 1 for line in table), "walk's"


def test_measuring_without_a_step_is_said(heads, capsys):
    prompts, out = heads.parent / "records.jsonl", heads.parent / "tree.json"
    prompts.write_text('{"token_ids": [0, 523, 287, 9], "generated": [[3, 4]]}\n')
    measure = ["--measure", prompts, "--target", ASSETS / "target", "--max-tokens", 1]
    assert run("tree", heads, "-n", 2, *measure, "--sizes", 1, 2, "--output", out) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No verification step was taken with 1, 2 nodes" in shown
    assert "nan" not in shown.lower()
    document = json.loads(out.read_text(), parse_constant=pytest.fail)
    found = document["source"]["measured"]["2"]
    assert found == {"tokens_per_step": None, "standard_error": None, "steps": 0, "prompts": 1}
    assert medusa(heads)["tree_source"]["measured"]["1"]["tokens_per_step"] is None


def test_step_costs_choose_the_size(heads, capsys):
    costs = heads.parent / "costs.json"
    costs.write_text('{"0": 10, "3": 10, "12": 30}')
    assert run("tree", heads, "-n", 12, "--step-cost", costs) == 0
    assert "3 draft nodes give most" in capsys.readouterr().out
    assert len(medusa(heads)["tree"]) == 3
    costs.write_text('{"0": 10, "3": 40}')
    assert run("tree", heads, "-n", 3, "--step-cost", costs) == 1
    assert "no tree is faster" in capsys.readouterr().out
    assert len(medusa(heads)["tree"]) == 3, "as it was"


def test_the_size_that_pays_pays_on_prompts_held_out(heads):
    """The texts that the tree was built from would choose another one at these costs."""
    found = curve(Observations.load(heads), "walk", Limits(24, 4), range(1, 25))
    slopes = [StepCost({0: 1.0, 24: 1 + share / 20}) for share in range(1, 60)]
    cost, size = next(
        (cost, size)
        for cost in slopes
        if (size := cost.best(found.sizes, found.expected())[0])
        not in (0, cost.best(found.sizes, found.walked)[0])
    )
    costs = heads.parent / "costs.json"
    costs.write_text(json.dumps(cost.times))
    assert run("tree", heads, "-n", 24, "--step-cost", costs) == 0
    assert len(medusa(heads)["tree"]) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "256"], "from 1 to 255"),
        (["--max-depth", "6"], "there are 5 heads"),
        (["--max-rank", "5"], "there are 4 calibrated choices"),
        (["--draw", "tree.txt"], "not a kind of picture"),
        (["--output", "nowhere/tree.json"], "no folder nowhere"),
        (["--sizes", "3"], "give --measure"),
        (["--measure", "prompts.jsonl"], "needs the target"),
        (["--step-cost", "nothing.json"], "can't be read"),
    ],
)
def test_what_can_not_work_is_refused(heads, capsys, arguments, message):
    before = (heads / "config.json").read_bytes()
    assert run("tree", heads, *arguments) == 2
    assert message in said(capsys)
    assert (heads / "config.json").read_bytes() == before


def test_only_a_tree_of_this_command_is_replaced(heads, capsys):
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
    assert len(medusa(heads)["tree"]) == 4, "as it was"


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)


def test_heads_that_changed_or_were_never_calibrated(heads, capsys):
    changed(heads / "model.safetensors")
    assert run("tree", heads) == 2
    assert "have changed since they were calibrated" in said(capsys)
    (heads / "calibration.safetensors").unlink()
    assert run("tree", heads) == 2
    assert "vllm-medusa calibrate TARGET" in capsys.readouterr().err
