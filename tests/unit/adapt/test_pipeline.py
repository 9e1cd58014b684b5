"""The stages, with fake jobs that write what the real ones would, the report, and the split."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import RecordingProgress

from vllm_medusa.adapt import pipeline, plan, report, stages
from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.pipeline import FILES, split_texts, stages_of
from vllm_medusa.adapt.plan import Plan, written_by_adapt
from vllm_medusa.adapt.stages import WorkFolder
from vllm_medusa.files import digest, read_json, write_json
from vllm_medusa.heads.checkpoint import peek_heads, save_heads, update_config
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import JobFailed
from vllm_medusa.offline.defaults import EnginePlan
from vllm_medusa.offline.records import Record, load_records
from vllm_medusa.training.options import HeadOptions, StepOptions, TextFiles
from vllm_medusa.training.train import Trained

TREE = [[0], [1], [0, 0], [2]]
MEDUSA = HeadOptions(kind="medusa")


def records(count: int) -> str:
    lines = ({"index": i, "token_ids": [i, 8, 9], "generated": [[1, 3]]} for i in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines)


def row(nodes: int, ratio: float, tau: float) -> dict[str, Any]:
    return {
        "num_draft_tokens": nodes, "tau": tau, "steps": 10, "plain_steps": 15, "ratio": ratio,
        "ratios": [ratio - 0.1, ratio, ratio + 0.1], "requests": 4, "identical": True,
        "differing_requests": 0, "differences": [],
    }  # fmt: skip


class Run:
    """An adapt run without models; any job may fail."""

    def __init__(self, folder: Path):
        self.folder, self.recorded = folder, RecordingProgress()
        self.failing: list[str] = []
        self.called: list[str] = []
        self.received: dict[str, Any] = {}
        self.cache, self.fastest = 1 << 30, 3
        self.rows = [row(1, 1.2, 1.25), row(3, 1.4, 1.5)]
        (folder / "prompts.jsonl").touch()

    def plan(self, **more: Any) -> Plan:
        files = {"prompts": self.folder / "prompts.jsonl", "output": self.folder / "heads"}
        options = AdaptOptions(target="target", **files, **more)
        engine = EnginePlan({"kv_cache_memory_bytes": self.cache})
        return Plan(options, {"sha256": "f" * 64}, "a" * 64, engine)

    def run(self, *, publish: bool = False, **more: Any) -> dict[str, Path]:
        """Run all stages; returns the folder of each."""
        self.called.clear()
        plan = self.plan(**more)
        inputs = (plan.target["sha256"], plan.prompts_digest)
        with WorkFolder(plan.options.work_folder, self.recorded, inputs) as work:
            work.run(stages_of(plan, work.at))
        if publish:
            self.document = report.collect(plan, work.finished, ["vllm-medusa", "adapt"])
            report.publish(plan, self.document, work.finished)
        return {name: stage.folder for name, stage in work.finished.items()}

    def job(self, job, options, progress, *, log, command):
        """Replaces `run_in_process`."""
        here = log.parent
        name = here.name.rpartition("-")[0]
        self.called.append(name)
        self.received[name] = options
        getattr(self, f"_{name}")(here)
        if name in self.failing:
            self.failing.remove(name)
            raise JobFailed("killed")

    def _check(self, here: Path) -> None: ...

    def _distill(self, here: Path) -> None:
        (here / "records.jsonl").write_text(records(6) if "distill" not in self.failing else "{")

    def _split(self, here: Path) -> None:
        split_texts(self.received["split"])

    def _train(self, here: Path) -> None:
        heads = MedusaHeads(2, 1, 8, 16, num_lm_heads=0, dtype=torch.float32)
        training = {"heldout": {"top": [[0.5, 0.7], [0.25, 0.4]], "labels": 90}}
        save_heads(here / "heads", heads, {"training": training})
        (here / "heads" / "training").mkdir(exist_ok=True)
        (here / "heads" / "training" / "curves.png").write_bytes(b"picture")
        if self.received["train"].method == "medusa-2":
            (here / "heads" / "target").mkdir(exist_ok=True)
            (here / "heads" / "target" / "config.json").touch()

    def _calibrate(self, here: Path) -> None:
        update_config(here / "heads", provenance={"by": "calibrate"})
        (here / "heads" / "calibration.safetensors").write_text("observations")

    def _tree(self, here: Path) -> None:
        source = {"tokens_per_step": [1.3, 1.5, 1.6, 1.7], "tokens_per_step_heldout": None}
        made = {"tree": TREE, "tree_source": source, "provenance": {"by": "tree"}}
        update_config(here / "heads", **made)

    def _compare(self, here: Path) -> None:
        machine = {"cpu": "c", "cores": 2, "memory_gb": 8, "load_average_at_start": 0, "gpus": []}
        measured = {
            "dtype": "float32", "temperature": 0.7, "batch": 1, "rounds": 3, "prompts": 4,
            "data": "measurement.jsonl", "max_tokens": 9, "machine": machine, "rows": self.rows,
            "engine_args": {"enforce_eager": True}, "fastest": self.fastest,
            "automatic": self.rows[-1] | {"num_draft_tokens": None},
        }  # fmt: skip
        write_json(here / "compare.json", measured)


@pytest.fixture
def adapt(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(stages, "run_in_process", run.job)
    return run


ALL = ["check", "distill", "split", "train", "calibrate", "tree", "compare"]


@pytest.mark.parametrize("name", ALL)
def test_only_an_interrupted_stage_runs_again(adapt, name):
    adapt.failing = [name] * 2
    for begun in (ALL[: ALL.index(name) + 1], [name]):
        with pytest.raises(JobFailed, match=f"^{name}: killed"):
            adapt.run()
        assert adapt.called == begun
    folders = adapt.run()
    assert list(folders) == ALL
    assert adapt.called == ALL[ALL.index(name) :]
    adapt.cache = 1 << 28  # other memory is not another stage
    assert adapt.run() == folders
    assert adapt.called == []
    noted = read_json(folders["train"] / "done.json")["outputs"]
    assert {file: digest(folders["train"] / file) for file in noted} == noted
    for stage, expected in (("calibrate", ["calibrate"]), ("tree", ["calibrate", "tree"])):
        heads = folders[stage] / "heads"
        by = [entry["by"] for entry in peek_heads(heads).config["medusa"]["provenance"]]
        assert by == expected, "once, and in a separate copy"
        assert len(os.listdir(heads)) == 3


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ({"samples": 2}, ALL[1:]),
        ({"heldout_share": 0.5}, ALL[2:]),
        ({"training": StepOptions(seed=1)}, ALL[1:]),
        ({"heads": MEDUSA}, ["check", *ALL[3:]]),  # texts are kept
        ({"measure_tokens": 64}, ["compare"]),
        ({"budgets": (1, 16)}, ["compare"]),
        ({"budgets": (1, 32)}, ["tree", "compare"]),
    ],
)
def test_changed_options_rerun_the_affected_stages(adapt, more, again):
    first = adapt.run()
    other = adapt.run(**more)
    assert adapt.called == again
    assert adapt.plan().key != adapt.plan(**more).key
    assert adapt.run() == first != other
    assert adapt.called == []


def test_later_stages_use_earlier_results(adapt):
    folders = adapt.run()
    received = adapt.received
    assert received["train"].files.data == folders["split"] / "train.jsonl"
    assert received["train"].files.heldout == folders["split"] / "calibration.jsonl"
    assert received["calibrate"].data == folders["split"] / "calibration.jsonl"
    assert received["compare"].prompts == folders["split"] / "measurement.jsonl"
    assert received["compare"].heads == str(folders["tree"] / "heads")
    assert received["tree"].num_draft_tokens == max(received["compare"].budgets) == 16
    assert received["distill"].engine_args == {"kv_cache_memory_bytes": 1 << 30}
    assert received["distill"].batch == 64


@pytest.mark.parametrize(("drafter", "stages"), [("hydra", ALL), ("eagle3", [*ALL[:4], ALL[6]])])
def test_a_drafter_of_another_kind(adapt, drafter, stages):
    folders = adapt.run(heads=HeadOptions(kind=drafter), publish=True)
    assert list(folders) == stages
    assert adapt.received["check"]["drafter"] == adapt.received["train"].heads.kind == drafter
    page = (adapt.folder / "heads" / "report.md").read_text()
    assert ("builds its trees itself" in page) == (drafter == "eagle3")
    if drafter == "eagle3":
        assert adapt.received["compare"].heads == str(folders["train"] / "heads")


def test_a_degraded_target_fails_the_stage_with_its_figures(tmp_path, monkeypatch):
    recorded = {"method": "medusa-2", "degraded": True, "shortfalls": ["KL is 0.3"]}
    trained = Trained(tmp_path / "heads", recorded)
    monkeypatch.setattr("vllm_medusa.training.train.train", lambda *_: trained)
    files = TextFiles(data=tmp_path, output=tmp_path / "heads")
    with pytest.raises(JobFailed, match=r"degraded: KL is 0\.3\. The model is in .*-degraded"):
        pipeline.train_checked(Run(tmp_path).plan().options.train_options(files))


def test_the_output_contains_heads_and_their_figures(adapt):
    adapt.run(publish=True, training=StepOptions(seed=3), budgets=(1, 3))
    output = adapt.folder / "heads"
    info = peek_heads(output)
    assert info.tree == TREE[:3] and len(info.taus) == 3
    medusa = info.config["medusa"]
    assert medusa["measured"]["fastest"] == 3
    assert [entry.get("by") for entry in medusa["provenance"]] == ["calibrate", "tree", None]
    assert (output / "calibration.safetensors").read_bytes() == b"observations"
    assert written_by_adapt(output) == adapt.plan(training=StepOptions(seed=3), budgets=(1, 3)).key
    page = (output / "report.md").read_text()
    for words in (
        "The fastest fixed number, 3 draft nodes, gives 1.40x.",
        "also has a static tree of 3 draft nodes",
        "| **3** | **1.50** |",
        "| 1 | 2 | 0.250 | 0.400 | 0.400 |",
        "Expected tau from calibration: 1.30 with 1, 1.60 with 3 draft nodes.",
        f"vllm-medusa serve target --speculative-model {output}",
        "seed 3, float32",
        "Fraction of 90 generated tokens",
        "Command: `vllm-medusa adapt`",
    ):
        assert words in page, words


def test_a_small_gain_is_reported(adapt):
    adapt.rows, adapt.fastest = [row(4, 0.8, 1.1)], 4
    adapt.run(publish=True)
    said = " ".join(report.conclusion(adapt.document))
    assert "The fastest fixed number, 4 draft nodes, gives 0.80x" in said
    assert "1.10 tokens per step is low: more training text than" in said


@pytest.mark.parametrize("there", [True, False])
def test_all_outputs_may_be_overwritten_also_through_a_link(adapt, tmp_path, there):
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "heads").mkdir()
    output = tmp_path / "heads"
    output.symlink_to(disk / "heads")
    for seed in (1, 2):
        more = {"method": "medusa-2", "heads": MEDUSA, "training": StepOptions(seed=seed)}
        adapt.run(publish=True, **more)
        assert output.is_symlink()
        assert written_by_adapt(disk / "heads") == adapt.plan(**more).key
    assert {path.name for path in output.iterdir()} == {name.rstrip("/") for name in plan.OURS}
    assert [path.name for path in disk.iterdir()] == ["heads"]
    page = (output / "report.md").read_text()
    assert f"serve {output}/target --speculative-model {output}" in page
    assert "generated by the original target" in page


def lines(prompts: int, samples: int = 2, **more: Any) -> list[dict[str, Any]]:
    row = {"generated": [[3, 6]], "temperature": 0.7, **more}
    return [
        row | {"index": p * samples + s, "request_id": f"r{p}", "token_ids": [5, p, 7, 8, 9 + s, 3]}
        for p in range(prompts)
        for s in range(samples)
    ]


def split(
    folder: Path,
    rows: list[dict[str, Any]],
    share: float = 0.1,
    bad: str = "refuse",
    tail: str = "",
) -> tuple[list[list[Record]], dict[str, Any]]:
    """The records of each file, and the counts."""
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    given = {"data": path, "output": folder, "heldout_share": share, "on_bad_line": bad}
    split_texts(given)
    return [load_records(folder / name)[0] for name in FILES], read_json(folder / "counts.json")


@pytest.mark.parametrize(
    ("prompts", "heldout"), [(2, 1), (3, 1), (4, 2), (8, 4), (32, 8), (200, 20)]
)
def test_no_prompt_is_on_both_sides(tmp_path, prompts, heldout):
    parts, counts = split(tmp_path, lines(prompts), bad="skip", tail="{\n")
    train, calibrate, measure = ({r.prompt_key for r in part} for part in parts)
    assert counts["prompts"] == [len(train), len(calibrate), len(measure)]
    assert counts["tokens"] == [3 * 2 * count for count in counts["prompts"]]
    assert not train & (calibrate | measure) and len(calibrate | measure) == heldout
    assert counts["disjoint"] == (heldout > 1) == calibrate.isdisjoint(measure)
    assert (calibrate == measure) == (heldout == 1) and counts["skipped_records"] == 1
    assert len(train) + heldout == prompts


def test_a_group_is_on_one_side_and_records_are_unchanged(tmp_path):
    rows = [row | {"group": f"{row['index'] % 20:064x}"} for row in lines(40, top_p=0.9, top_k=7)]
    parts, counts = split(tmp_path, rows, 0.4)
    groups = [{record.index % 20 for record in part} for part in parts]
    assert [len(part) for part in groups] == counts["prompts"] == [12, 4, 4]
    assert len(set().union(*groups)) == 20
    kept = {replace(record, line=0) for part in parts for record in part}
    assert kept == {replace(r, line=0) for r in load_records(tmp_path / "records.jsonl")[0]}


def test_one_prompt_is_too_few_and_bad_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="records of 1 prompts"):
        split(tmp_path, lines(1, samples=5))
    with pytest.raises(ValueError, match="line 7"):
        split(tmp_path, lines(3), tail="{\n")
