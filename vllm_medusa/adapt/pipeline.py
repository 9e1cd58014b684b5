"""The stages of adapt, each reading what earlier ones left: eight, and a trial of longer jobs.

An EAGLE-3 drafter grows its trees by itself: it is compared as it was trained.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_medusa.adapt.amounts import Amounts, Rates, batch_rows, expected_seconds
from vllm_medusa.adapt.checks import Plan
from vllm_medusa.adapt.report import FIGURES
from vllm_medusa.adapt.served import ServedOptions, check_served
from vllm_medusa.adapt.split import COUNTS, SplitOptions, split_texts
from vllm_medusa.adapt.stages import Stage, WorkFolder
from vllm_medusa.adapt.trial import RATES, TrialOptions, try_machine
from vllm_medusa.calibration.calibrate import calibrate
from vllm_medusa.calibration.choose import choose_tree
from vllm_medusa.calibration.options import CalibrateOptions, TreeOptions
from vllm_medusa.files import digest, read_json
from vllm_medusa.job import SILENT, JobFailed, Progress
from vllm_medusa.offline.comparison import compare
from vllm_medusa.offline.options import BatchOptions, CompareOptions, EngineOptions
from vllm_medusa.training.distill import distill
from vllm_medusa.training.heldout import FILES
from vllm_medusa.training.options import (
    DistillOptions,
    MachineOptions,
    RecordFiles,
    TextOptions,
    TrainOptions,
)
from vllm_medusa.training.train import train

_STAGES, _DRAFTER_STAGES = 8, 5
RECORDS, RELIABILITY, PICTURE = "records.jsonl", "calibration.png", "tree.png"
HEADS = ("config.json", "model.safetensors")
CALIBRATED = (*HEADS, "calibration.safetensors")


def count_stages(plan: Plan) -> int:
    """How many there are."""
    usual = _DRAFTER_STAGES if plan.training.heads.kind == "eagle3" else _STAGES
    return usual + (not plan.small)


def run_stages(plan: Plan, work: WorkFolder) -> None:
    """Bring every stage to its end."""
    options, training = plan.options, plan.training
    dtype, texts, measuring = options.dtype, options.texts, options.measuring
    joint = training.method == "medusa-2"
    weights = {"target": plan.target["sha256"]}
    kind = training.heads.kind
    served = ServedOptions(
        target=options.target, dtype=dtype, drafter=kind, aux_layers=training.heads.aux_layers
    )
    what = "will vLLM serve the target with such heads"
    work.run(Stage("check", check_served, lambda here: served, weights, what=what))
    rates = None
    if not plan.small:
        tried = work.run(_trying(plan))
        rates = Rates(**read_json(tried / RATES))
        work.expected, work.at_most = _expected(plan, rates, plan.amounts), True
    written = work.run(_distilling(plan))
    split = work.run(
        Stage(
            "split",
            split_texts,
            lambda here: SplitOptions(
                data=written / RECORDS,
                output=here,
                heldout_share=texts.heldout_share,
                on_bad_line=options.files.on_bad_line,
            ),
            {"records": digest(written / RECORDS)},
            [*FILES, COUNTS],
            what="which texts are to train, to calibrate and to measure on",
        )
    )
    if rates is not None:  # now it is known how long the answers are
        tokens = sum(read_json(split / COUNTS)["tokens"])
        amounts = replace(plan.amounts, written=tokens)
        work.expected, work.at_most = _expected(plan, rates, amounts), False
    trained = work.run(
        Stage(
            "train",
            train_unharmed,
            lambda here: replace(
                training,
                model=options.target,
                files=replace(
                    training.files,
                    data=split / FILES[0],
                    heldout=split / FILES[1],
                    output=here / "heads",
                ),
            ),
            weights | {"texts": split.name},
            [*_in_heads(HEADS), *(["heads/target/config.json"] if joint else [])],
            "train",
        )
    )
    target = str(trained / "heads" / "target") if joint else options.target
    asked = measuring.num_draft_tokens
    budgets = (asked,) if asked else tuple(sorted(set(measuring.budgets)))

    def comparison(of: Path) -> Stage:
        return Stage(
            "compare",
            compare,
            lambda here: CompareOptions(
                target=target,
                heads=str(of / "heads"),
                data=split / FILES[2],
                budgets=budgets,
                temperature=texts.temperature,
                max_tokens=measuring.measure_tokens,
                limit=measuring.measure_prompts,
                rounds=measuring.rounds,
                seconds=measuring.measure_seconds,
                seed=options.seed,
                engine=EngineOptions(dtype=dtype, engine_args=options.engine_args),
                output=here / FIGURES,
            ),
            {"heads": of.name, "target": trained.name, "texts": split.name},
            [FIGURES],
            "compare",
        )

    if kind == "eagle3":
        work.run(comparison(trained))
        return
    calibrated = work.run(
        Stage(
            "calibrate",
            calibrate,
            lambda here: CalibrateOptions(
                model=target,
                heads=here / "heads",
                data=split / FILES[1],
                positions=measuring.positions,
                plot=here / RELIABILITY,
                machine=MachineOptions(dtype=dtype),
            ),
            {"heads": trained.name, "texts": split.name},
            [*_in_heads(CALIBRATED), RELIABILITY],
            "calibrate",
            partial(_copy, trained, HEADS),
        )
    )

    def tree(name: str, nodes: int) -> Stage:
        return Stage(
            name,
            choose_tree,
            lambda here: TreeOptions(
                heads=here / "heads", num_draft_tokens=nodes, draw=here / PICTURE
            ),
            {"heads": calibrated.name},  # both times: neither search knows of the other
            [*_in_heads(CALIBRATED), PICTURE],
            "tree",
            partial(_copy, calibrated, CALIBRATED),
        )

    grown = work.run(tree("tree", max(budgets)))
    measured = work.run(comparison(grown))
    work.run(tree("final-tree", asked or read_json(measured / FIGURES)["fastest"]))


def train_unharmed(
    options: TrainOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Train heads; a target that lost too much by it is none to go on with.

    Raises:
        JobFailed: saying what it lost.

    """
    trained = train(options, progress, command)
    if trained.degraded:
        raise JobFailed(f"the new target is degraded: {trained.degradation}")


def _trying(plan: Plan) -> Stage:
    training = plan.training
    return Stage(
        "trial",
        try_machine,
        lambda here: TrialOptions(
            training=replace(
                training,
                model=plan.options.target,
                files=replace(training.files, output=here / "heads"),
            ),
            batch=min(plan.engine.batch, plan.amounts.texts),
            rows=batch_rows(training, plan.amounts),
        ),
        {"target": plan.target["sha256"]},
        [RATES],
        what="a few steps on random text, to see how long the rest takes",
    )


def _expected(plan: Plan, rates: Rates, amounts: Amounts) -> dict[str, float]:
    compiled = plan.engine.compiled
    return expected_seconds(amounts, rates, plan.options, plan.training, compiled=compiled)


def _distilling(plan: Plan) -> Stage:
    options = plan.options
    files, texts = options.files, options.texts

    def asked(here: Path) -> DistillOptions:
        return DistillOptions(
            model=options.target,
            files=RecordFiles(
                prompts=files.prompts,
                output=here / RECORDS,
                format=files.format,
                column=files.column,
                on_bad_line=files.on_bad_line,
            ),
            sampling=TextOptions(
                samples=texts.samples,
                max_tokens=texts.max_tokens,
                temperature=(texts.temperature,),
                seed=options.seed,
            ),
            engine=BatchOptions(
                dtype=options.dtype,
                batch=plan.engine.batch,
                engine_args=plan.engine.arguments | options.engine_args,
            ),
        )

    inputs = {"target": plan.target["sha256"], "prompts": plan.prompts_digest}
    return Stage("distill", distill, asked, inputs, [RECORDS], "distill")


def _in_heads(files: Iterable[str]) -> list[str]:
    return [f"heads/{name}" for name in files]


def _copy(earlier: Path, files: Iterable[str], here: Path) -> None:
    """Give a stage that changes heads in place a copy of those of an earlier stage.

    Every attempt starts from the earlier files, so nothing is noted in them twice; what the job
    keeps beside them to resume stays.
    """
    (here / "heads").mkdir(exist_ok=True)
    for name in files:
        place = here / "heads" / name
        # not aside and renamed: a rename of one link over another does nothing at all
        place.unlink(missing_ok=True)
        try:  # the same file: all here are replaced as a whole, never written into
            os.link(earlier / "heads" / name, place)
        except OSError:  # a file system without links
            shutil.copyfile(earlier / "heads" / name, place)
