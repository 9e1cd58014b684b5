"""The whole pipeline as started by a user, killed once during a stage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_medusa.heads.checkpoint import load_heads

pytestmark = pytest.mark.engine

ASSETS = Path(__file__).parents[2] / "tests" / "assets"
PATH = os.pathsep.join([str(ASSETS.parent), os.environ.get("PYTHONPATH", "")])
NODES = 3
OPTIONS = {
    "--samples": 2,
    "--max-tokens": 24,
    "--num-heads": 2,
    "--epochs": 2,
    "--budgets": NODES,
    "--measure-tokens": 16,
    "--measure-seconds": 1,
    "--dtype": "float32",
    "--engine-args": '{"enforce_eager": true}',
}


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_medusa.cli", "adapt", str(ASSETS / "target")]
    command += ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "heads")]
    command += [str(part) for option in OPTIONS.items() for part in option]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
    )


def finish(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=800)
    assert process.returncode == 0, said
    return said


def kill_in_stage(process: subprocess.Popen[str], name: str) -> None:
    """SIGKILL the command itself once the stage has started; its children must end."""
    assert process.stderr is not None
    for line in process.stderr:
        if f"/7 {name}: " in line:
            break
    else:
        raise AssertionError(f"{name} never began")
    children: list[psutil.Process] = []
    while not children:
        time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    psutil.wait_procs(children, timeout=120)
    assert not [child for child in children if child.is_running()]


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_from_prompts_to_measured_heads(tmp_path: Path) -> None:
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    kill_in_stage(start(tmp_path), "train")
    heads = tmp_path / "heads"
    assert not heads.exists()
    said = finish(start(tmp_path))
    assert "distill: already done" in said
    assert "All tokens of 4 requests equal plain vLLM's" in " ".join(said.split())

    loaded, info = load_heads(heads, hidden_size=256, vocab_size=4096)
    assert loaded.num_heads == 2
    medusa = info.config["medusa"]
    assert len(medusa["tree"]) == NODES
    assert [entry["command"][1] for entry in medusa["provenance"]] == [
        *("train", "calibrate", "tree", "adapt")
    ]
    report = read(heads / "report.json")
    (row,) = report["measured"]["rows"]
    assert row["identical"]
    assert row["num_draft_tokens"] == NODES
    assert row["tau"] > 1
    prompts = report["prompts"]
    assert [prompts[name] for name in ("trained", "calibrated", "measured")] == [4, 2, 2]
    page = (heads / "report.md").read_text()
    assert "(curves.png)" in page
    assert (heads / "curves.png").read_bytes().startswith(b"\x89PNG")
