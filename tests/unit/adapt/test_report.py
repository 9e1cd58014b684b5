import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_medusa.adapt import checks, report
from vllm_medusa.adapt.checks import written_by_adapt
from vllm_medusa.adapt.options import AdaptOptions, training_of
from vllm_medusa.adapt.plan import Amounts, Plan
from vllm_medusa.adapt.stages import Finished
from vllm_medusa.heads import MedusaHeads, peek_heads, save_heads
from vllm_medusa.offline.defaults import EnginePlan

TREE = [[0], [1], [0, 0]]


def row(nodes: int, ratio: float, tau: float) -> dict[str, Any]:
    return {
        "num_draft_tokens": nodes, "tau": tau, "steps": 10, "plain_steps": 15, "ratio": ratio,
        "ratios": [ratio - 0.1, ratio, ratio + 0.1], "requests": 4, "identical": True,
        "differing_requests": 0, "differences": [],
    }  # fmt: skip


class Made:
    """Folders as the stages leave them."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]], fastest: int):
        names = ("train", "calibrate", "tree", "final-tree", "split", "compare")
        self.folders = {name: folder / name for name in names}
        for path in self.folders.values():
            path.mkdir()
        heads = MedusaHeads(2, 1, 8, 16, shared_lm_head=True, dtype=torch.float32)
        source = {"tokens_per_step": [1.3, 1.5, 1.6], "tokens_per_step_heldout": [1.2, None, 1.5]}
        training = {"heldout": {"top": [[0.5, 0.7], [0.25, 0.4]], "labels": 90}}
        for name, tree in (("tree", [*TREE, [2]]), ("final-tree", TREE)):
            more = {"tree": tree, "tree_source": source, "training": training}
            save_heads(self.folders[name] / "heads", heads, more)
            (self.folders[name] / "heads" / "calibration.safetensors").write_bytes(b"observations")
        (folder / "final-tree/tree.png").write_bytes(b"picture")
        curves = self.folders["train"] / "heads" / "training"
        curves.mkdir(parents=True)
        (curves / "curves.png").write_bytes(b"picture")
        counts = {"prompts": [10, 4, 4], "tokens": [500, 9, 9], "left_out": 0, "disjoint": True}
        (self.folders["split"] / "counts.json").write_text(json.dumps(counts))
        machine = {"cpu": "c", "cores": 2, "memory_gb": 8, "load_average_at_start": 0, "gpus": []}
        measured = {
            "dtype": "float32", "temperature": 0.7, "batch": 1, "rounds": 3, "prompts": 4,
            "data": "measurement.jsonl", "max_tokens": 9, "machine": machine, "rows": rows,
            "engine_args": {"enforce_eager": True}, "fastest": fastest,
        }  # fmt: skip
        (self.folders["compare"] / "compare.json").write_text(json.dumps(measured))
        (folder / "prompts.jsonl").touch()
        self.output = folder / "heads"
        self.asked = {}
        self.stages = {
            name: Finished(path, f"vllm-medusa {name}", 12.0) for name, path in self.folders.items()
        }

    def options(self) -> AdaptOptions:
        files = {"prompts": self.output.with_name("prompts.jsonl"), "output": self.output}
        return AdaptOptions(target="target", **files, seed=3, **self.asked)

    def plan(self) -> Plan:
        options = self.options()
        target = {"sha256": "f" * 64}
        amounts, engine = Amounts(1, 1, 1), EnginePlan({}, 1, None)
        return Plan(options, training_of(options), target, 18, "a" * 64, amounts, engine)

    def document(self) -> dict[str, Any]:
        return report.collect(self.plan(), self.stages, ["vllm-medusa", "adapt"])

    def publish(self, **changes: Any) -> Path:
        report.publish(self.plan(), self.document() | changes, self.stages)
        return self.output


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path, [row(1, 1.2, 1.25), row(3, 1.4, 1.5)], fastest=3)


def test_the_output_is_heads_that_know_how_they_fared(made):
    output = made.publish()
    info = peek_heads(output)
    assert info.tree == TREE
    medusa = info.config["medusa"]
    assert medusa["measured"]["fastest"] == 3
    assert medusa["measured"]["machine"]["cpu"] == "c"
    assert (output / "calibration.safetensors").read_bytes() == b"observations"
    assert written_by_adapt(output) == made.plan().key
    page = (output / "report.md").read_text()
    for words in (
        "Fastest on this machine: 3 draft nodes, 1.40 times plain vLLM.",
        "The heads' own tree has 3 draft nodes; ",
        "| **3** | **1.50** |",
        "| 1 | t + 3 | 0.250 | 0.400 | 0.400 |",
        "1 node 1.20 (4 % below the measured); 3 nodes 1.50 (0 % above the measured)",
        f"vllm-medusa serve target --speculative-model {output}",
        "10 prompts of prompts.jsonl",
        "(500 tokens of the target's)",
        "neither trained nor calibrated on",
        "without torch.compile",
        "seed 3, float32",
        "Shares of 90 generated tokens",
        "| train | 12 | `vllm-medusa train` |",
        "Command: `vllm-medusa adapt`",
    ):
        assert words in page, words


def test_heads_that_guess_little_are_said_to_need_more_text(tmp_path):
    said = report.conclusion(Made(tmp_path, [row(1, 0.9, 1.1)], fastest=1).document())
    assert "1.10 tokens per step is little: more text to train on than 500 tokens" in said


def test_all_that_is_written_may_be_overwritten(made):
    (made.folders["train"] / "heads" / "target").mkdir()
    written = {path.name for path in made.publish().iterdir()}
    assert "target" in written
    assert written == {name.rstrip("/") for name in checks.OURS}


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link_stays_one(made, tmp_path, there):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "heads").mkdir()
    made.output.symlink_to(disk / "heads")
    made.publish(key="one")
    output = made.publish(key="two")
    assert output.is_symlink()
    assert written_by_adapt(disk / "heads") == "two"
    assert f"--speculative-model {output}" in (output / "report.md").read_text()
    assert [path.name for path in disk.iterdir()] == ["heads"]


@pytest.mark.parametrize("method", ["medusa-1", "medusa-2"])
def test_whose_texts_calibration_used_is_said_where_the_target_was_trained(made, method):
    made.asked["method"] = method
    page = (made.publish() / "report.md").read_text()
    assert ("written by the original target, not by the one trained" in page) == (
        method == "medusa-2"
    )


@pytest.mark.parametrize("disjoint", [True, False])
def test_one_prompt_each_may_be_two_or_the_same(made, disjoint):
    counts = {"prompts": [2, 1, 1], "tokens": [9, 9, 9], "left_out": 0, "disjoint": disjoint}
    (made.folders["split"] / "counts.json").write_text(json.dumps(counts))
    page = (made.publish() / "report.md").read_text()
    assert ("neither trained nor calibrated on" in page) == disjoint
    assert ("not trained on, but calibrated on" in page) == (not disjoint)


def test_no_gain_is_said_and_the_size_asked_for_is_kept(tmp_path):
    made = Made(tmp_path, [row(3, 0.8, 1.5)], fastest=3)
    made.asked["num_draft_tokens"] = 3
    said = report.conclusion(made.document())
    assert "No tree is faster than plain vLLM on this machine" in said
    assert "0.80 times" in said
    assert "own tree has 3 draft nodes; " in said
    made.asked["num_draft_tokens"] = 16
    said = report.conclusion(made.document())
    assert "has 3 draft nodes (16 were asked for: it can have no more)" in said
