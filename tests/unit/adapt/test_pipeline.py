import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.told import Told

from vllm_medusa.adapt import pipeline, stages
from vllm_medusa.adapt.options import AdaptOptions, training_of
from vllm_medusa.adapt.pipeline import (
    CALIBRATED,
    COUNTS,
    HEADS,
    count_stages,
    run_stages,
    split_texts,
)
from vllm_medusa.adapt.plan import Amounts, Plan
from vllm_medusa.adapt.stages import StageFailed, WorkFolder
from vllm_medusa.files import digest, read_json, write_json
from vllm_medusa.heads import MedusaHeads, peek_heads, save_heads, update_config
from vllm_medusa.job import JobFailed
from vllm_medusa.offline.defaults import EnginePlan
from vllm_medusa.training.train import Trained


def records(count: int) -> str:
    lines = [
        json.dumps({"index": i, "token_ids": [i, 8, 9], "generated": [[1, 3]]})
        for i in range(count)
    ]
    return "\n".join(lines) + "\n"


class Run:
    """An adapt whose jobs leave what the real ones would; any may fail once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.failing = []
        self.called = []
        self.asked = {}
        self.cache, self.batch = 1 << 30, 64
        self.told = Told()

    def plan(self, **more: Any) -> Plan:
        files = {"prompts": Path("prompts.jsonl"), "output": self.folder / "heads"}
        options = AdaptOptions(target="target", **files, **more)
        engine = EnginePlan({"kv_cache_memory_bytes": self.cache}, self.batch, None)
        amounts = Amounts(6, 6, 12)
        return Plan(options, training_of(options), {"sha256": "f"}, 9, "a", amounts, engine)

    def run(self, **more: Any) -> dict[str, Path]:
        """Run all stages; the folder of each."""
        self.called.clear()
        plan = self.plan(**more)
        count = count_stages(plan.options)
        with WorkFolder(plan.options.work_folder, count, self.told) as work:
            run_stages(plan, work)
        assert len(work.finished) == count
        return {name: stage.folder for name, stage in work.finished.items()}

    def job(self, job, options, progress, *, log, command=()):
        """Stands in for `run_in_process`."""
        _, options = options
        here = log.parent
        name = here.name.rpartition("-")[0]
        self.called.append(name)
        self.asked[name] = options
        if name == "split":
            split_texts(**options)
        elif name != "check":
            getattr(self, f"_{name.replace('-', '_')}")(here)
        if name in self.failing:
            self.failing.remove(name)
            raise JobFailed("killed")

    def _distill(self, here: Path) -> None:
        with (here / "records.jsonl").open("a") as file:
            file.write(records(6) if "distill" not in self.failing else "{")
        if "distill" not in self.failing:
            (here / "records.jsonl").write_text(records(6))

    def _train(self, here: Path) -> None:
        heads = MedusaHeads(1, 1, 8, 16, shared_lm_head=True, dtype=torch.float32)
        save_heads(here / "heads", heads, {"tree": [[0]]})

    def _calibrate(self, here: Path) -> None:
        update_config(here / "heads", provenance={"by": "calibrate"})
        (here / "heads" / "calibration.safetensors").write_text("observations")

    def _tree(self, here: Path) -> None:
        update_config(here / "heads", tree=[[0], [1]], provenance={"by": "tree"})
        (here / "tree.png").touch()

    def _compare(self, here: Path) -> None:
        write_json(here / "compare.json", {"fastest": 8})

    _final_tree = _tree


@pytest.fixture
def adapt(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(stages, "run_in_process", run.job)
    return run


ALL = ["check", "distill", "split", "train", "calibrate", "tree", "compare", "final-tree"]


@pytest.mark.parametrize("name", ALL)
def test_a_stage_that_broke_off_is_run_again_and_no_other(adapt, name):
    adapt.failing = [name] * 2
    for begun in (ALL[: ALL.index(name) + 1], [name]):
        with pytest.raises(StageFailed, match=f"^{name}: killed"):
            adapt.run()
        assert adapt.called == begun
    assert list(adapt.run()) == ALL
    assert adapt.called == ALL[ALL.index(name) :]
    adapt.run()
    assert adapt.called == []


@pytest.mark.parametrize(("name", "source"), [("calibrate", "train"), ("tree", "calibrate")])
def test_a_stage_killed_and_resumed_leaves_the_heads_before_it_alone(adapt, name, source):
    adapt.failing = [name] * 2
    for _ in range(2):
        with pytest.raises(StageFailed, match="killed"):
            adapt.run()
    folders = adapt.run()
    noted = read_json(folders[source] / "done.json")["outputs"]
    assert {file: digest(folders[source] / file) for file in noted} == noted
    heads = folders[name] / "heads"
    medusa = peek_heads(heads).config["medusa"]
    assert medusa["tree"] == ([[0]] if name == "calibrate" else [[0], [1]])
    noted = {"calibrate": ["calibrate"], "tree": ["calibrate", "tree"]}
    assert [entry["by"] for entry in medusa["provenance"]] == noted[name]
    assert sorted(os.listdir(heads)) == sorted(CALIBRATED)
    assert set(HEADS) < set(CALIBRATED)


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ({"samples": 2}, ALL[1:2]),  # which here writes the same records
        ({"heldout_share": 0.5}, ALL[2:]),
        ({"seed": 1}, ["distill", "train", "calibrate", "tree", "compare", "final-tree"]),
        ({"measure_prompts": 1}, ["compare"]),
        ({"budgets": (8, 16)}, ["compare"]),
        ({"budgets": (4, 32)}, ["tree", "compare"]),
        ({"num_draft_tokens": 3}, ALL[5:]),
    ],
)
def test_other_options_run_the_stages_again_that_they_concern(adapt, more, again):
    first = adapt.run()
    other = adapt.run(**more)
    assert adapt.called == again
    assert adapt.plan().key != adapt.plan(**more).key
    assert adapt.run() == first
    assert adapt.called == []
    assert other != first


def test_later_stages_get_what_earlier_ones_left(adapt):
    folders = adapt.run()
    asked = adapt.asked
    assert asked["train"].files.data == folders["split"] / "train.jsonl"
    assert asked["train"].files.heldout == folders["split"] / "calibration.jsonl"
    assert asked["calibrate"].data == folders["split"] / "calibration.jsonl"
    assert asked["compare"].prompts == folders["split"] / "measurement.jsonl"
    assert asked["compare"].heads == str(folders["tree"] / "heads")
    assert asked["tree"].num_draft_tokens == max(asked["compare"].budgets)
    assert asked["final-tree"].num_draft_tokens == 8
    assert asked["distill"].engine_args == {"kv_cache_memory_bytes": 1 << 30}
    assert asked["distill"].batch == 64


def test_other_memory_is_no_other_stage(adapt):
    adapt.run()
    adapt.cache, adapt.batch = 1 << 28, 3
    adapt.run()
    assert adapt.called == []


def test_a_drafter_is_compared_as_it_was_trained(adapt):
    folders = adapt.run(drafter="eagle3")
    assert list(folders) == ["check", "distill", "split", "train", "compare"]
    assert adapt.asked["check"]["drafter"] == adapt.asked["train"].heads.kind == "eagle3"
    assert adapt.asked["compare"].heads == str(folders["train"] / "heads")
    assert list(adapt.run(drafter="hydra")) == ALL
    assert adapt.asked["train"].heads.kind == "hydra"


def test_a_target_that_lost_too_much_fails_the_stage_and_says_what(tmp_path, monkeypatch):
    told = {"method": "medusa-2", "degraded": True, "shortfalls": ["KL is 0.3"]}
    trained = Trained(tmp_path / "heads", told)
    monkeypatch.setattr("vllm_medusa.training.train.train", lambda *_: trained)
    with pytest.raises(JobFailed, match=r"degraded: KL is 0\.3\. The model is kept in .*-degraded"):
        pipeline.train_unharmed(training_of(Run(tmp_path).plan().options))


def test_a_bad_record_is_refused_unless_it_is_to_be_skipped(tmp_path):
    (tmp_path / "records.jsonl").write_text(records(6) + "{\n")
    options = {"data": tmp_path / "records.jsonl", "output": tmp_path, "heldout_share": 0.1}
    with pytest.raises(ValueError, match="line 7"):
        split_texts(**options, on_bad_line="refuse")
    split_texts(**options, on_bad_line="skip")
    assert read_json(tmp_path / COUNTS)["left_out"] == 1


@pytest.mark.parametrize(("prompts", "disjoint"), [(3, False), (5, True)])
def test_the_split_notes_whether_its_halves_share_a_prompt(tmp_path, prompts, disjoint):
    (tmp_path / "records.jsonl").write_text(records(prompts))
    split_texts(tmp_path / "records.jsonl", tmp_path, 0.1, "refuse")
    counts = read_json(tmp_path / COUNTS)
    assert counts["prompts"][1:] == [1, 1]
    assert counts["disjoint"] == disjoint
