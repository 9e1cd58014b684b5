"""The stages of `vllm-medusa adapt`, and how one's results become the next one's inputs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli import adapt_report, compare, distill
from vllm_medusa.cli.adapt_checks import Facts
from vllm_medusa.cli.stages import HERE, WORK, Stage, WorkFolder, write_json
from vllm_medusa.files import digest as digest_of
from vllm_medusa.offline.defaults import engine_arguments
from vllm_medusa.offline.prompts import Prompt, PromptError, read_prompts
from vllm_medusa.training.heldout import FILES, split_records

TARGET, PROMPTS = "{target}", "{prompts}"  # as `WorkFolder` places them
HEADS = ("config.json", "model.safetensors")
CALIBRATED = (*HEADS, "calibration.safetensors")
COUNTS, FIGURES, PICTURE = "counts.json", "compare.json", "tree.png"
RELIABILITY = "calibration.png"
_BATCH = 64  # prompts at a time, distill's own number


class Adaptation:
    """One run of the command over its work folder."""

    count = 8

    def __init__(
        self, args: argparse.Namespace, facts: Facts, key: str, work: WorkFolder, console: Console
    ):
        """Take the checked command; ``key`` names all that the result depends on."""
        self.args, self.facts, self.key, self.work, self.console = args, facts, key, work, console
        self.weights = {"target": facts.target["sha256"]}
        self.folders: dict[str, Path] = {}

    def run(self) -> int:
        """Run what is not finished, write the output; 0, or 1 if tokens differ in float32."""
        self._check()
        self._distill()
        self._split()
        self._train()
        self._calibrate()
        self._tree("tree", self.args.num_draft_tokens or max(self.args.budgets))
        self._compare()
        self._tree("final-tree", self._fastest())
        document = adapt_report.collect(self.args, self.facts, self.key, self.work, self.folders)
        adapt_report.publish(self.args, document, self.folders)
        figures = document["measured"]
        self.console.print(compare.table(figures))
        self.console.print(adapt_report.conclusion(document), soft_wrap=True)
        self.console.print(
            f"heads and report in {self.args.output}; {escape(str(self.args.work))} is no longer "
            "needed",
            soft_wrap=True,
        )
        identical = all(row["identical"] for row in figures["rows"])
        return 0 if identical or figures["dtype"] != "float32" else 1

    def _run(self, stage: Stage, prepare: Any = None, complete: Any = None) -> None:
        self.folders[stage.name] = self.work.run(stage, prepare, complete)

    def _check(self) -> None:
        def empty(here: Path) -> None:
            shutil.rmtree(here / "heads", ignore_errors=True)

        args = [TARGET, f"{HERE}/heads", self.args.dtype]
        self._run(Stage("check", args, self.weights, module="vllm_medusa.cli.serves"), empty)

    def _distill(self) -> None:
        args = self.args
        command = ["distill", TARGET, "--prompts", PROMPTS]
        command += ["--output", f"{HERE}/records.jsonl", "--temperature", f"{args.temperature:g}"]
        command += ["--max-tokens", str(args.max_tokens), "--samples", str(args.samples)]
        command += ["--seed", str(args.seed), *_dtype(args)]
        for name in ("format", "column", "on_bad_line", "batch"):
            value = getattr(args, name)
            if value not in (None, "auto", "refuse"):
                command += [f"--{name.replace('_', '-')}", str(value)]
        given = engine_arguments(
            str(args.target), _prompts(args), args.max_tokens, args.batch or _BATCH
        )
        command += ["--engine-args", json.dumps(given | args.engine_args)]
        inputs = self.weights | {"prompts": self.facts.prompts_digest}
        # prompts that vLLM refuses end with status 1, and so does an engine that dies
        accepted = (0, 1) if args.on_bad_line == "skip" else (0,)
        stage = Stage("distill", command, inputs, ["records.jsonl"], accepted=accepted)
        self._run(stage, None, lambda here: distill.is_finished(args, here / "records.jsonl"))

    def _split(self) -> None:
        records = self.folders["distill"] / "records.jsonl"

        def split(here: Path) -> None:
            counts, tokens, bad, disjoint = split_records(records, here, self.args.heldout_share)
            if bad and self.args.on_bad_line == "refuse":
                raise PromptError(f"{records}, line {bad[0].line}: {bad[0].reason}")
            document = {"prompts": counts, "tokens": tokens, "left_out": len(bad)}
            write_json(here / COUNTS, document | {"disjoint": disjoint})
            self.console.print(
                "  prompts: {} to train on, {} to calibrate on, {} to measure on".format(*counts)
            )

        inputs = {"records": digest_of(records), "share": str(self.args.heldout_share)}
        self._run(Stage("split", [], inputs, [*FILES, COUNTS]), split)

    def _train(self) -> None:
        command = train_command(self.args, self._of("split"))
        outputs = _inside(HEADS)
        if self.args.method == "medusa-2":
            outputs.append("heads/target/config.json")
        self._run(Stage("train", command, self.weights, outputs))

    def _calibrate(self) -> None:
        command = ["calibrate", self.target, f"{HERE}/heads", *_dtype(self.args)]
        command += ["--data", f"{self._of('split')}/calibration.jsonl"]
        command += ["--plot", f"{HERE}/{RELIABILITY}"]
        inputs = {"heads": self.folders["train"].name}
        stage = Stage("calibrate", command, inputs, [*_inside(CALIBRATED), RELIABILITY])
        self._on_heads_of("train", HEADS, stage)

    def _tree(self, name: str, nodes: int) -> None:
        command = ["tree", f"{HERE}/heads", "--num-draft-tokens", str(nodes)]
        command += ["--draw", f"{HERE}/{PICTURE}"]
        # of the calibrated heads both times: neither search knows of the other
        inputs = {"heads": self.folders["calibrate"].name}
        stage = Stage(name, command, inputs, [*_inside(CALIBRATED), PICTURE])
        self._on_heads_of("calibrate", CALIBRATED, stage)

    def _fastest(self) -> int:
        """The tree's size: what was asked for, or what was fastest, may it be slow."""
        fixed: int | None = self.args.num_draft_tokens
        return fixed or int(read_json(self.folders["compare"] / FIGURES)["fastest"])

    def _compare(self) -> None:
        args = self.args
        budgets = [args.num_draft_tokens] if args.num_draft_tokens else sorted(set(args.budgets))
        command = ["compare", self.target, f"{self._of('tree')}/heads"]
        command += ["--data", f"{self._of('split')}/measurement.jsonl", *_dtype(self.args)]
        command += ["--budgets", *map(str, budgets), "--temperature", f"{args.temperature:g}"]
        command += ["--max-tokens", str(args.measure_tokens), "--limit", str(args.measure_prompts)]
        command += ["--rounds", str(args.rounds), "--seed", str(args.seed)]
        command += ["--output", f"{HERE}/{FIGURES}"]
        if args.engine_args:
            command += ["--engine-args", json.dumps(args.engine_args)]

        def empty(here: Path) -> None:
            (here / FIGURES).unlink(missing_ok=True)

        self._run(Stage("compare", command, {}, [FIGURES], accepted=(0, 1)), empty)

    @property
    def target(self) -> str:
        """What the heads are served with: the target, or what Medusa-2 made of it."""
        trained = self.folders["train"] / "heads" / "target"
        return f"{self._of('train')}/heads/target" if trained.is_dir() else TARGET

    def _of(self, name: str) -> str:
        """The folder of a stage that was run, as commands name it."""
        return f"{WORK}/{self.folders[name].name}"

    def _on_heads_of(self, earlier: str, files: tuple[str, ...], stage: Stage) -> None:
        """Run a command that changes heads in place on a copy of those of an earlier stage.

        Every attempt starts from the earlier files, so nothing is noted in them twice; what the
        command keeps beside them to resume stays.
        """
        source = self.folders[earlier] / "heads"

        def copy(here: Path) -> None:
            (here / "heads").mkdir(exist_ok=True)
            for name in files:
                place = here / "heads" / name
                # not aside and renamed: a rename of one link over another does nothing at all
                place.unlink(missing_ok=True)
                place.with_name(f"{name}.part").unlink(missing_ok=True)
                _link(source / name, place)

        self._run(stage, copy)


def train_command(args: argparse.Namespace, data: str) -> list[str]:
    """The command of the stage, with the texts in the folder ``data``."""
    command = ["train", TARGET, "--data", f"{data}/{FILES[0]}"]
    command += ["--heldout", f"{data}/{FILES[1]}", "--output", f"{HERE}/heads"]
    command += ["--method", args.method, "--seed", str(args.seed), *_dtype(args)]
    for name in ("num_heads", "num_layers", "epochs", "learning_rate"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name.replace('_', '-')}", f"{value:g}"]
    return command + shlex.split(args.train_args)


def _dtype(args: argparse.Namespace) -> list[str]:
    return [] if args.dtype == "auto" else ["--dtype", args.dtype]


def _prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    for record in read_prompts(args.prompts, args.format, args.column):
        if isinstance(record, Prompt):
            yield record


def _inside(files: tuple[str, ...]) -> list[str]:
    return [f"heads/{name}" for name in files]


def _link(source: Path, place: Path) -> None:
    """The same file under another name: all here are replaced as a whole, never written into."""
    try:
        os.link(source, place)
    except OSError:  # a file system without links
        shutil.copyfile(source, place)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document
