import argparse
import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from vllm_medusa import cli
from vllm_medusa.cli import adapt_stages, stages
from vllm_medusa.cli.adapt_checks import Facts
from vllm_medusa.cli.adapt_stages import CALIBRATED, HEADS, Adaptation
from vllm_medusa.cli.stages import StageFailed, WorkFolder
from vllm_medusa.files import digest as digest_of
from vllm_medusa.heads import MedusaHeads, peek_heads, save_heads, update_config


class Run:
    """An adapt up to one of its stages; what the stages' commands do is the test's."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.args = argparse.Namespace(dtype="auto")

    def stage(self, name: str, *arguments: Any, **earlier: Path) -> Path:
        """Run one stage on the folders of earlier ones, as a new process would; its folder."""
        console = Console(file=io.StringIO())
        with WorkFolder(self.folder, console, Adaptation.count, {}) as work:
            adaptation = Adaptation(self.args, Facts({"sha256": "f"}, 9, "a"), "key", work, console)
            adaptation.folders |= earlier
            getattr(adaptation, f"_{name.replace('-', '_')}")(*arguments)
            return adaptation.folders[name]


@pytest.fixture
def adapt(tmp_path: Path) -> Run:
    return Run(tmp_path / "work")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of a finished stage that has heads."""
    folder = tmp_path / "work" / "earlier"
    heads = MedusaHeads(1, 1, 8, 16, shared_lm_head=True, dtype=torch.float32)
    save_heads(folder / "heads", heads, {"tree": [[0]]})
    (folder / "heads" / "calibration.safetensors").write_bytes(b"observations")
    return folder


@pytest.mark.parametrize("name", ["calibrate", "tree"])
def test_a_stage_killed_and_resumed_leaves_the_heads_before_it_alone(
    adapt: Run, earlier: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kills = 2
    heads = earlier / "heads"
    before = {path.name: digest_of(path) for path in heads.iterdir()}

    def command(command: Sequence[str], log: Path, _: Any) -> int:
        nonlocal kills
        if kills:
            kills -= 1
            return -signal.SIGKILL
        update_config(log.parent / "heads", tree=[[0], [1]])
        (log.parent / "tree.png").touch()
        (log.parent / "heads" / "calibration.safetensors").touch()
        (log.parent / "calibration.png").touch()
        return 0

    monkeypatch.setattr(stages, "run_logged", command)
    arguments = () if name == "calibrate" else ("tree", 2)
    folders = {"train": earlier, "calibrate": earlier, "split": earlier}
    for _ in range(2):
        with pytest.raises(StageFailed, match="status -9"):
            adapt.stage(name, *arguments, **folders)
    here = adapt.stage(name, *arguments, **folders)
    assert peek_heads(here / "heads").tree == [[0], [1]]
    assert {path.name: digest_of(path) for path in heads.iterdir()} == before
    assert sorted(path.name for path in (here / "heads").iterdir()) == sorted(CALIBRATED)
    assert set(HEADS) < set(CALIBRATED)


def test_texts_that_a_crash_left_unwritten_are_not_passed_over(
    adapt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1 is of refused prompts, which may be skipped, and of any uncaught exception."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"promt": "b"}\n{"turns": ["c", "d"]}\n')
    options = [
        "--prompts",
        str(prompts),
        "--output",
        "o",
        "--on-bad-line",
        "skip",
        "--samples",
        "2",
    ]
    adapt.args = cli.build_parser().parse_args(["adapt", "t", *options])
    monkeypatch.setattr(adapt_stages, "engine_arguments", lambda *_: {})
    lines = ['{"index": 0}', '{"index": 2, "error": "too long"}', '{"index": 9}', '{"index": 8}']
    written: list[str] = []

    def command(command: Sequence[str], log: Path, _: Any) -> int:
        (log.parent / "records.jsonl").write_text("".join(written))
        return 1

    monkeypatch.setattr(stages, "run_logged", command)
    for line in lines:
        written.append(line + "\n")
        with pytest.raises(StageFailed, match="distill broke off and ended with status 1"):
            adapt.stage("distill")
    written.append('{"index": 10, "tor')
    with pytest.raises(StageFailed, match="broke off"):
        adapt.stage("distill")
    written[-1] = '{"index": 10}\n'
    assert (adapt.stage("distill") / "done.json").exists()


@pytest.mark.parametrize(("prompts", "disjoint"), [(3, False), (5, True)])
def test_the_split_notes_whether_its_halves_share_a_prompt(
    adapt: Run, tmp_path: Path, prompts: int, disjoint: bool
) -> None:
    lines = [
        json.dumps({"index": i, "token_ids": [i, 8, 9], "generated": [[1, 3]]})
        for i in range(prompts)
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    adapt.args.heldout_share, adapt.args.on_bad_line = 0.1, "refuse"
    counts = json.loads((adapt.stage("split", distill=tmp_path) / "counts.json").read_text())
    assert counts["prompts"][1:] == [1, 1]
    assert counts["disjoint"] == disjoint
