"""The whole pipeline as started by a user, killed once during a stage."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import commands
from support.assets import ASSETS, HIDDEN, TARGET, VOCAB
from support.engines import inspect_in_this_process

from vllm_medusa.heads.checkpoint import load_heads

pytestmark = pytest.mark.engine

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


def command(folder: Path) -> list[str]:
    files = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "heads")]
    return ["adapt", TARGET, *files, *(str(part) for option in OPTIONS.items() for part in option)]


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


def test_from_prompts_to_measured_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    inspect_in_this_process(TARGET)
    # compiled losses are tested in `tests/unit/training/test_losses.py`
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    whole = [sys.executable, "-m", "vllm_medusa.cli", *command(tmp_path)]
    kill_in_stage(subprocess.Popen(whole, stderr=subprocess.PIPE, text=True), "train")
    heads = tmp_path / "heads"
    assert not heads.exists()
    monkeypatch.setattr(sys, "argv", ["vllm-medusa", *command(tmp_path)])
    status, said = commands.run(*command(tmp_path)), commands.said(capfd)
    assert status == 0, said
    assert "distill: already done" in said
    assert "All tokens of 4 requests equal plain vLLM's" in said

    loaded, info = load_heads(heads, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert loaded.num_heads == 2
    medusa = info.config["medusa"]
    assert len(medusa["tree"]) == NODES
    assert [entry["command"][1] for entry in medusa["provenance"]] == [
        *("train", "calibrate", "tree", "adapt")
    ]
    report = json.loads((heads / "report.json").read_text())
    (row,) = report["measured"]["rows"]
    assert row["identical"]
    assert row["num_draft_tokens"] == NODES
    assert row["tau"] > 1
    prompts = report["prompts"]
    assert [prompts[name] for name in ("trained", "calibrated", "measured")] == [4, 2, 2]
    page = (heads / "report.md").read_text()
    assert "(curves.png)" in page
    assert (heads / "curves.png").read_bytes().startswith(b"\x89PNG")
