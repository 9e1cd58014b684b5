"""`python -m demo` with real engines on the small model: what CI can run of `make demo`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.assets import ASSETS, HEADS, TARGET
from support.engines import inspect_in_this_process

pytestmark = pytest.mark.engine


def test_both_engines_are_recorded_and_agree(tmp_path: Path) -> None:
    inspect_in_this_process(TARGET)
    prompts = (ASSETS / "prompts.jsonl").read_text().splitlines()[:2]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    command = [sys.executable, "-m", "demo", "--target", TARGET, "--drafter", HEADS, "--eager"]
    command += ["--prompts", "prompts.jsonl", "--max-tokens", "24", "--json", "r.json"]
    command += ["--speculative-config", '{"budget": 7}']  # automatic may rest on a busy machine
    done = subprocess.run(
        [*command, "--record", "r.svg"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "IDENTICAL" in done.stdout and "2/2" in done.stdout
    document = json.loads((tmp_path / "r.json").read_text())
    for run in document["runs"]:
        plain, drafted = run["plain"], run["drafted"]
        assert plain["token_ids"] == drafted["token_ids"] and plain["token_ids"]
        assert all(len(step["pieces"]) == 1 for step in plain["steps"])
        times = [step["at"] for step in drafted["steps"]]
        assert times == sorted(times) and times[0] > 0
    steps = [len(r["drafted"]["steps"]) for r in document["runs"]]
    assert sum(steps) < sum(len(r["plain"]["steps"]) for r in document["runs"])
    ElementTree.fromstring((tmp_path / "r.svg").read_text())
