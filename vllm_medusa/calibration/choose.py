"""The draft tree that suits calibrated heads, written into their config."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.budgets import ALGORITHMS, Curve, Limits, StepCost, curve
from vllm_medusa.calibration.loading import check_folder, load
from vllm_medusa.calibration.measure import Measured, measure, walked_by_prompt
from vllm_medusa.calibration.observations import FILE, Observations
from vllm_medusa.calibration.options import MeasureOptions, TreeOptions
from vllm_medusa.calibration.pictures import check_picture, draw_tree
from vllm_medusa.calibration.prompts import prompt_ids
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.files import new_file, refuse_to_replace
from vllm_medusa.heads import update_config
from vllm_medusa.heads.files import digest_heads, find_checkpoint
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.tree import TokenTree, TreeError, read_tree
from vllm_medusa.tree.topology import Path as TreePath


@dataclass(frozen=True)
class Chosen:
    """A tree and what is known of it.

    If at these costs no tree is faster than plain decoding, nothing is measured or written.
    """

    observations: Observations  # the calibration that it follows from
    curves: dict[str, Curve]  # by algorithm, what trees of all sizes are worth
    curve: Curve  # of the algorithm asked for; the tree is its first ``size`` paths
    cost: StepCost | None  # of verification steps, if they chose the size
    size: int  # draft nodes; 0: plain decoding is faster, and what follows is empty
    gain: float | None  # tokens per time against plain decoding's, by the costs
    walked: Measured  # the tree's tokens per step, by prompts
    chances: dict[TreePath, float]  # share of the steps that accept each node, the root () included
    measured: dict[int, Measured]  # by size, tokens per step of real decoding

    @property
    def paths(self) -> list[TreePath]:
        """The tree, best first."""
        return self.curve.paths[: self.size]


def choose_tree(
    options: TreeOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Chosen:
    """Build the tree that gives calibrated heads the most tokens per step, and write it down.

    Raises:
        ValueError: heads without a calibration of theirs, or options that don't go with it.

    """
    if options.output:
        refuse_to_replace(options.output, "tree", _is_tree)
    if options.draw:
        check_picture(options.draw)
    observations = Observations.load(options.heads)
    _check(options, observations)
    cost = StepCost.load(options.step_cost) if options.step_cost else None
    prompts, temperature = _prompts(options.measuring, observations)
    limits = Limits(
        options.num_draft_tokens, options.max_rank or observations.num_ranks, options.max_depth
    )
    sizes = range(1, limits.num_draft_tokens + 1)
    curves = {}
    for done, name in enumerate(ALGORITHMS):
        progress.at("building trees", done, len(ALGORITHMS))
        curves[name] = curve(observations, name, limits, sizes)
    progress.at("building trees", len(ALGORITHMS), len(ALGORITHMS))
    chosen = curves[options.algorithm]
    size, gain = len(chosen.paths), None
    if size < limits.num_draft_tokens:
        progress.warn(
            f"{limits.num_draft_tokens} nodes were asked for; {chosen.algorithm} finds {size} "
            f"within depth {options.max_depth or observations.num_heads} and {limits.max_rank} "
            "choices a head."
        )
    if cost is not None:
        size, gain = cost.best(chosen.sizes, chosen.expected())
    if size == 0:
        return Chosen(observations, curves, chosen, cost, 0, gain, Measured((), ()), {}, {})
    paths = chosen.paths[:size]
    walks = Walks(observations.texts(), paths)
    visits = walks.visits()
    chances = {path: float(n / visits[0]) for path, n in zip(walks.paths, visits, strict=True)}
    walked = walked_by_prompt(observations, paths)
    measured = _measure(options, paths, prompts, temperature, progress) if prompts else {}
    found = Chosen(observations, curves, chosen, cost, size, gain, walked, chances, measured)
    if options.draw:
        draw_tree(options.draw, paths, chances, _title(options.heads, found))
    note = _note(found, limits)
    tree = [list(path) for path in paths]
    if options.output:
        with new_file(options.output) as file:
            file.write(json.dumps({"tree": tree, "source": note}, allow_nan=False) + "\n")
    if not options.dry_run:
        update_config(
            options.heads,
            tree=tree,
            tree_tokens_per_step=note["tokens_per_step"],
            tree_source=note,
            provenance=provenance(command, [options.heads / FILE]),
        )
    return found


def origin(observations: Observations) -> str:
    """What a calibration was made of, in words."""
    temperature = observations.temperature()
    wrote = "text not by the target" if temperature is None else f"T = {temperature:g}"
    return f"{len(observations.ranks)} positions, {wrote}"


def _check(options: TreeOptions, observations: Observations) -> None:
    if not options.dry_run:
        check_folder(options.heads)
    for name, value, most, what in (
        ("--max-depth", options.max_depth, observations.num_heads, "heads"),
        ("--max-rank", options.max_rank, observations.num_ranks, "calibrated choices (--top-k)"),
    ):
        if value is not None and value > most:
            raise CalibrationError(f"{name} is {value}; there are {most} {what}. Ask for less.")
    digest = observations.source.get("heads")
    if digest is not None and digest != digest_heads(find_checkpoint(options.heads)):
        raise CalibrationError(
            f"the heads in {options.heads} have changed since they were calibrated, so what is "
            "known of them is no longer true; run `vllm-medusa calibrate` again."
        )


def _prompts(how: MeasureOptions, observations: Observations) -> tuple[list[list[int]], float]:
    """Token ids to decode from, none where nothing is to be measured; and the temperature."""
    if how.prompts is None:
        return [], 0.0
    temperature = observations.temperature() if how.temperature is None else how.temperature
    if temperature is None:
        raise CalibrationError(
            "the calibration's texts don't say at which temperature the target wrote them; say how "
            "to decode with --temperature."
        )
    from transformers import AutoTokenizer  # takes seconds to import

    tokenizer = AutoTokenizer.from_pretrained(how.target)
    return prompt_ids(how.prompts, tokenizer, how.limit), temperature


def _measure(
    options: TreeOptions,
    paths: Sequence[TreePath],
    prompts: list[list[int]],
    temperature: float,
    progress: Progress,
) -> dict[int, Measured]:
    """Tokens per step of real decoding, for every size asked for."""
    how = options.measuring
    target, heads, _ = load(str(how.target), options.heads, how.machine)
    sizes = sorted({min(size, len(paths)) for size in how.sizes or [len(paths)]})
    total = len(sizes) * len(prompts) * how.samples
    done = count(1)
    return {
        size: measure(
            target.model,
            heads,
            TokenTree.from_paths(paths[:size]),
            prompts,
            max_new_tokens=how.max_tokens,
            temperature=temperature,
            seed=how.seed,
            samples=how.samples,
            end_tokens=target.end_tokens,
            progress=lambda: progress.at("texts", next(done), total),
        )
        for size in sizes
    }


def _title(heads: Path, chosen: Chosen) -> str:
    """What is written above the picture."""
    heldout = chosen.curve.heldout[chosen.size - 1]
    elsewhere = "" if heldout is None else f" ({heldout:.2f} on prompts held out)"
    return (
        f"{heads.resolve().name}: {chosen.size} draft nodes, {chosen.walked.tau:.2f} tokens per "
        f"step expected{elsewhere}\n{chosen.curve.algorithm}; {origin(chosen.observations)}"
    )


def _note(chosen: Chosen, limits: Limits) -> dict[str, Any]:
    """Where the tree is from, as plain JSON."""
    by = chosen.curve

    def per_size(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else round(value, 4) for value in values[: chosen.size]]

    return {
        "algorithm": by.algorithm,
        "max_depth": limits.max_depth,
        "max_rank": limits.max_rank,
        "temperature": chosen.observations.temperature(),
        "positions": len(chosen.observations.ranks),
        "tokens_per_step": per_size(by.walked),
        "standard_error": _number(chosen.walked.standard_error),
        "tokens_per_step_heldout": per_size(by.heldout),
        "tokens_per_step_if_independent": per_size(by.independent),
        "measured": {
            str(n): {
                "tokens_per_step": _number(result.tau),
                "standard_error": _number(result.standard_error),
                "steps": sum(result.steps),
                "prompts": len(result.steps),
            }
            for n, result in chosen.measured.items()
        },
    }


def _is_tree(document: dict[str, Any]) -> bool:
    """Whether this is what --output holds."""
    try:
        read_tree(document)
    except TreeError:
        return False
    note = document.get("source")
    return isinstance(note, dict) and "algorithm" in note


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
