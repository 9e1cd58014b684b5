"""The adapt job: a list of stages, each reading the results of earlier ones.

EAGLE-3 drafters build their own trees, so they skip the stages "calibrate" and "tree".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.plan import Plan, check, written_by_adapt
from vllm_medusa.adapt.stages import Stage, WorkFolder
from vllm_medusa.calibration.options import CalibrateOptions, TreeOptions
from vllm_medusa.files import FileRefused, write_json
from vllm_medusa.job import SILENT, JobFailed, Progress
from vllm_medusa.offline.engine import refuse_unserved
from vllm_medusa.offline.options import CompareOptions, DistillOptions
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.offline.records import Record, load_records, split_heldout, write_records
from vllm_medusa.options import taken
from vllm_medusa.training.options import MachineOptions, TextFiles, TrainOptions

RECORDS, COUNTS, FIGURES = "records.jsonl", "counts.json", "compare.json"
FILES = TRAIN, CALIBRATE, MEASURE = "train.jsonl", "calibration.jsonl", "measurement.jsonl"
HEADS = ("heads/config.json", "heads/model.safetensors")
CALIBRATED = (*HEADS, "heads/calibration.safetensors")
_CALIBRATED_TOKENS = 16_384  # approximate number of generated tokens to calibrate on
_HELDOUT_PROMPTS = 8  # min prompts held out, but at most half of them
_ROUNDS = 3  # max rounds of the final measurement


def adapt(
    options: AdaptOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Train heads for a target; if killed, the same call resumes.

    Returns the contents of report.json; None: a dry run, or the output already has these heads.
    """
    plan = check(options, progress)
    if options.dry_run:
        return None
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
    with WorkFolder(options.work_folder, progress, inputs) as work:
        work.run(stages_of(plan, work.at))
        document = collect(plan, work.finished, command)
        publish(plan, document, work.finished)
    return document


def stages_of(plan: Plan, at: Callable[[str], Path]) -> list[Stage]:
    """All stages in order; ``at`` gives the folder of an earlier one."""
    from vllm_medusa.calibration.calibrate import calibrate
    from vllm_medusa.calibration.choose import choose_tree
    from vllm_medusa.offline.comparison import compare
    from vllm_medusa.training.distill import distill

    options, kind = plan.options, plan.options.heads.kind
    joint, drafter = options.method == "medusa-2", kind == "eagle3"
    budgets = tuple(sorted(set(options.budgets)))
    serving = {
        "target": options.target,
        "dtype": options.dtype,
        "drafter": kind,
        "aux_layers": options.heads.aux_layers,
    }

    def target() -> str:
        return str(at("train") / "heads" / "target") if joint else options.target

    def part(name: str) -> Path:
        return at("split") / name

    stages = [
        Stage(
            "check",
            "whether vLLM can serve the target with such a drafter",
            check_served,
            lambda here: serving,
        ),
        Stage(
            "distill",
            "the target answers the prompts",
            distill,
            lambda here: taken(
                DistillOptions,
                options,
                model=options.target,
                output=here / RECORDS,
                overwrite=False,
                temperature=(options.temperature,),
                engine_args=plan.engine.arguments | options.engine_args,
            ),
            [RECORDS],
        ),
        Stage(
            "split",
            "texts to train, to calibrate and to measure on",
            split_texts,
            lambda here: {
                "data": at("distill") / RECORDS,
                "output": here,
                "heldout_share": options.heldout_share,
                "on_bad_line": options.on_bad_line,
            },
            [*FILES, COUNTS],
        ),
        Stage(
            "train",
            "the drafter learns to predict these answers",
            train_checked,
            lambda here: options.train_options(
                TextFiles(data=part(TRAIN), heldout=part(CALIBRATE), output=here / "heads")
            ),
            [*HEADS, *(["heads/target/config.json"] if joint else [])],
        ),
        Stage(
            "calibrate",
            "how often each rank of each head is right, on held-out answers",
            calibrate,
            lambda here: CalibrateOptions(
                model=target(),
                heads=here / "heads",
                data=part(CALIBRATE),
                positions=_CALIBRATED_TOKENS,
                machine=MachineOptions(dtype=options.dtype),
            ),
            CALIBRATED,
            changes="train",
        ),
        Stage(
            "tree",
            "the best tree of each size",
            choose_tree,
            lambda here: TreeOptions(heads=here / "heads", num_draft_tokens=max(budgets)),
            CALIBRATED,
            changes="calibrate",
        ),
        Stage(
            "compare",
            "vLLM with the drafter against plain vLLM, on prompts not used so far",
            compare,
            lambda here: taken(
                CompareOptions,
                options,
                target=target(),
                heads=str(at("train" if drafter else "tree") / "heads"),
                prompts=part(MEASURE),
                budgets=budgets,
                batch=1,
                max_tokens=options.measure_tokens,
                rounds=_ROUNDS,
                seconds=options.measure_seconds,
                output=here / FIGURES,
            ),
            [FIGURES],
        ),
    ]
    return [s for s in stages if not (drafter and s.name in ("calibrate", "tree"))]


def check_served(
    serving: Mapping[str, Any], progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Check vLLM's configuration for a target, for EAGLE-3 with an untrained drafter.

    Without this check, the plugin would refuse unsupported settings only after hours of training.
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
    """Write the records to train, to calibrate and to measure on, and their counts.

    No prompt is in two files, and the files do not depend on the order of the records' lines. At
    least `_HELDOUT_PROMPTS` prompts are held out, but at most half of all: half of these to
    calibrate on, half to measure on; a single one is used for both.
    """
    data, output = options["data"], options["output"]
    records, bad = load_records(data)
    prompts = _count_prompts(records)
    if prompts < 2:
        raise ValueError(
            f"{data} has records of {prompts} prompts; at least 2 are needed, one of them "
            "to hold out."
        )
    settle_bad_lines(data, bad, options["on_bad_line"], progress)
    wanted = max(round(options["heldout_share"] * prompts), _HELDOUT_PROMPTS)
    train, heldout = split_heldout(records, min(wanted, prompts // 2) / prompts)
    parts = [train, heldout, heldout]
    if disjoint := _count_prompts(heldout) > 1:
        parts[1:] = split_heldout(heldout, 0.5)
    for name, part in zip(FILES, parts, strict=True):
        write_records(output / name, part)
    counts = [_count_prompts(part) for part in parts]
    tokens = [sum(record.num_generated for record in part) for part in parts]
    document = {"prompts": counts, "tokens": tokens, "disjoint": disjoint}
    write_json(output / COUNTS, document | {"skipped_records": len(bad)})
    progress.note(
        "  prompts: {} to train on, {} to calibrate on, {} to measure on".format(*counts)
        + f"; {tokens[0]} generated tokens to train on"
    )


def _count_prompts(records: Sequence[Record]) -> int:
    return len({record.prompt_key for record in records})


def train_checked(
    options: TrainOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> None:
    """Train heads.

    Raises JobFailed: the new target is degraded.
    """
    from vllm_medusa.training.train import train

    trained = train(options, progress, command)
    if trained.degraded:
        raise JobFailed(f"the new target is degraded: {trained.degradation}")
