"""The adapt job: sequential stages, each reading the results of earlier ones.

EAGLE-3 drafters build their own trees, so they are compared right after training.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.plan import Plan, check, written_by_adapt
from vllm_medusa.adapt.stages import WorkFolder
from vllm_medusa.calibration.options import CalibrateOptions, TreeOptions
from vllm_medusa.files import FileRefused, write_json
from vllm_medusa.job import SILENT, JobFailed, Progress
from vllm_medusa.offline.engine import refuse_unserved
from vllm_medusa.offline.options import CompareOptions, DistillOptions
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.options import taken
from vllm_medusa.training.heldout import FILES, split_records
from vllm_medusa.training.options import MachineOptions, TextFiles, TrainOptions

RECORDS, COUNTS, FIGURES = "records.jsonl", "counts.json", "compare.json"
HEADS = ("heads/config.json", "heads/model.safetensors")
CALIBRATED = (*HEADS, "heads/calibration.safetensors")
_CALIBRATED_TOKENS = 16_384  # approximate number of generated tokens to calibrate on
_ROUNDS = 3  # max rounds of the final measurement


def adapt(
    options: AdaptOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Train heads for a target; if killed, the same call resumes.

    Returns the contents of report.json; None: the output already has these heads.
    """
    plan = check(options, progress)
    output = options.output
    existing = written_by_adapt(output)
    if existing == plan.key and not options.overwrite:
        return None
    if existing is not None and not options.overwrite:
        raise FileRefused(
            f"{output} holds heads of another adapt run: other options, prompts or weights. Pass "
            "--overwrite to replace them, or name another --output."
        )
    from vllm_medusa.adapt.report import collect, publish  # imports packages that were just checked

    inputs = (plan.target["sha256"], plan.prompts_digest)
    with WorkFolder(options.work_folder, count_stages(options), progress, inputs) as work:
        run_stages(plan, work)
        document = collect(plan, work.finished, command)
        publish(plan, document, work.finished)
    return document


def count_stages(options: AdaptOptions) -> int:
    """The number of stages."""
    return 5 if options.heads.kind == "eagle3" else 7


def run_stages(plan: Plan, work: WorkFolder) -> None:
    """Run all stages."""
    from vllm_medusa.calibration.calibrate import calibrate
    from vllm_medusa.calibration.choose import choose_tree
    from vllm_medusa.offline.comparison import compare
    from vllm_medusa.training.distill import distill

    options = plan.options
    joint = options.method == "medusa-2"
    budgets = tuple(sorted(set(options.budgets)))
    serving = {
        "target": options.target,
        "dtype": options.dtype,
        "drafter": options.heads.kind,
        "aux_layers": options.heads.aux_layers,
    }
    served = "check that vLLM can serve the target with such heads"
    work.run("check", check_served, lambda here: serving, command=served)
    written = work.run(
        "distill",
        distill,
        lambda here: taken(
            DistillOptions,
            options,
            model=options.target,
            output=here / RECORDS,
            overwrite=False,
            temperature=(options.temperature,),
            batch=plan.engine.batch,
            engine_args=plan.engine.arguments | options.engine_args,
        ),
        [RECORDS],
    )
    split = work.run(
        "split",
        split_texts,
        lambda here: {
            "data": written / RECORDS,
            "output": here,
            "heldout_share": options.heldout_share,
            "on_bad_line": options.on_bad_line,
        },
        [*FILES, COUNTS],
        "split the texts: to train, to calibrate and to measure",
    )
    to_train, to_calibrate, to_measure = (split / name for name in FILES)
    trained = work.run(
        "train",
        train_unharmed,
        lambda here: options.train_options(
            TextFiles(data=to_train, heldout=to_calibrate, output=here / "heads")
        ),
        [*HEADS, *(["heads/target/config.json"] if joint else [])],
    )
    target = str(trained / "heads" / "target") if joint else options.target
    heads = trained
    if options.heads.kind != "eagle3":
        calibrated = work.run(
            "calibrate",
            calibrate,
            lambda here: CalibrateOptions(
                model=target,
                heads=here / "heads",
                data=to_calibrate,
                positions=_CALIBRATED_TOKENS,
                machine=MachineOptions(dtype=options.dtype),
            ),
            CALIBRATED,
            prepare=lambda here: copy_files(trained, here, HEADS),
        )
        heads = work.run(
            "tree",
            choose_tree,
            lambda here: TreeOptions(heads=here / "heads", num_draft_tokens=max(budgets)),
            CALIBRATED,
            prepare=lambda here: copy_files(calibrated, here, CALIBRATED),
        )
    work.run(
        "compare",
        compare,
        lambda here: taken(
            CompareOptions,
            options,
            target=target,
            heads=str(heads / "heads"),
            prompts=to_measure,
            budgets=budgets,
            batch=1,
            max_tokens=options.measure_tokens,
            rounds=_ROUNDS,
            seconds=options.measure_seconds,
            output=here / FIGURES,
        ),
        [FIGURES],
    )


def copy_files(source: Path, here: Path, names: Sequence[str]) -> None:
    """Copy heads that a stage changes in place: every attempt starts from the same ones."""
    (here / "heads").mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, here / name)


def check_served(
    serving: Mapping[str, Any], progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Check vLLM's configuration for a target, with an untrained drafter if it is EAGLE's.

    The plugin refuses unsupported settings; finding that out after training would take hours.
    """
    import torch
    from transformers import AutoConfig

    from vllm_medusa.heads.checkpoint import save_drafter
    from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape, choose_layers

    target, speculation = serving["target"], {"method": "medusa", "lookup": True}
    with TemporaryDirectory(prefix="vllm-medusa-") as temporary:
        if serving["drafter"] == "eagle3":
            config = AutoConfig.from_pretrained(target).get_text_config()
            hidden, vocab, folder = config.hidden_size, config.vocab_size, Path(temporary, "heads")
            layers = choose_layers(tuple(serving["aux_layers"]), config.num_hidden_layers)
            shape = EagleShape.of(config, layers, hidden, vocab)
            drafter = EagleDrafter(shape, 1, torch.arange(min(64, vocab)))
            save_drafter(folder, drafter.to(torch.bfloat16))
            speculation = {"method": "eagle3", "model": str(folder), "tree": "dynamic"}
        refuse_unserved(
            {"model": target, "speculative_config": speculation, "dtype": serving["dtype"]}
        )


def split_texts(
    options: Mapping[str, Any], progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Write the records to train, to calibrate and to measure on, and their counts."""
    data, output = options["data"], options["output"]
    counts, tokens, bad, disjoint = split_records(data, output, options["heldout_share"])
    settle_bad_lines(data, bad, options["on_bad_line"], progress)
    document = {"prompts": counts, "tokens": tokens, "disjoint": disjoint}
    write_json(output / COUNTS, document | {"skipped_records": len(bad)})
    progress.note("  prompts: {} to train on, {} to calibrate on, {} to measure on".format(*counts))


def train_unharmed(
    options: TrainOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Train heads. Raises JobFailed: the target degraded too much."""
    from vllm_medusa.training.train import train

    trained = train(options, progress, command)
    if trained.degraded:
        raise JobFailed(f"the new target is degraded: {trained.degradation}")
