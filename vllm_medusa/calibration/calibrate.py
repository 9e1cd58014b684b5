"""Measure heads on records; the observations are saved with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.collect import FOLDER, collect
from vllm_medusa.calibration.observations import EAGLE, FILE, NO_LABEL, Observations
from vllm_medusa.calibration.options import CalibrateOptions
from vllm_medusa.calibration.walks import Walks, walked_tree
from vllm_medusa.files import Run
from vllm_medusa.heads.checkpoint import peek_heads, provenance_of, update_config
from vllm_medusa.heads.eagle_checkpoint import drafter_method
from vllm_medusa.heads.files import digest_heads, find_checkpoint
from vllm_medusa.heads.fingerprint import match_target
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.inputs import identify, limits_of, read_usable
from vllm_medusa.training.medusa1 import load_for
from vllm_medusa.training.target import Target, stored_dtype, target_dtype
from vllm_medusa.training.workers import Workers

WALKED_NODES = 63


def calibrate(
    options: CalibrateOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure heads on texts, and save the observations; if killed, the same call resumes.

    Returns the summary that is added to the heads' config.json, plain JSON. ``temperature`` of
    ``fit`` is the divisor of a head's logits that calibrates its confidence.
    """
    check_folder(options.heads)
    files = find_checkpoint(options.heads)
    if drafter_method(files) is not None:
        raise CalibrationError(EAGLE.format(options.heads))
    info = peek_heads(files)
    if warning := match_target(files, options.model).warning:
        progress.warn(warning)
    config, fingerprint, _ = identify(options.model)
    records = _read(options, config, progress)
    machine, device = options.machine, Workers(options.machine.device).device
    dtype = target_dtype(machine.dtype, stored_dtype(config), device)
    target = Target.load(
        options.model, dtype=dtype, device=device, quantization=machine.quantization
    )
    heads = load_for(target, files, dtype)
    origin = provenance(command, [options.data])
    if origin["data"][0]["sha256"] in _trained_on(info.medusa):
        progress.warn(
            f"the heads were trained on {options.data}: their accuracy on it is higher than in "
            "serving. Calibrate on held-out records, such as training/heldout.jsonl next to the "
            "heads."
        )
    source = {
        "target": fingerprint,
        "heads": digest_heads(files),
        "data": origin["data"],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": machine.quantization,
    }
    settings = source | {"positions": options.positions}
    with Run(options.heads / FOLDER, settings, of=options.heads, restart=True) as run:
        observations, fitted = collect(records, heads, target, run, progress=progress)
        observations.source.update(source)
        texts = observations.texts()
        progress.at("walking the texts", 0, 1)
        tree = walked_tree(texts, WALKED_NODES, observations.num_ranks)
        walks = Walks(texts, tree)
        progress.at("walking the texts", 1, 1)
        summary = {
            "file": FILE,
            "positions": len(observations.ranks),
            "texts": observations.num_texts,
            "prompts": len(np.unique(observations.prompts)),
            "temperature": observations.temperature(),
            "walked_with": [list(path) for path in tree],
            "tokens_per_step": round(walks.tau(), 4),
            **measure_accuracy(observations, walks),
            "fit": [value and {"temperature": round(value, 4)} for value in fitted],
            "source": source,
        }
        observations.save(options.heads)
        update_config(options.heads, calibration=summary, provenance=origin)
        run.remove()
    return summary


def check_folder(heads: Path) -> None:
    """Refuse heads whose folder is not writable."""
    if not heads.is_dir():
        raise CalibrationError(
            f"{heads} is not a local folder, but results are saved with the heads. Pass the "
            "folder of the heads (download or convert them first)."
        )
    if not os.access(heads, os.W_OK):
        raise CalibrationError(
            f"{heads} is not writable, but results are saved there; copy the heads."
        )


def _read(options: CalibrateOptions, config: Any, progress: Progress) -> list[Record]:
    """The requested records; warns about unusual ones."""
    data = options.data
    records = read_usable(data, limits_of(options.model, config), options.on_bad_line, progress)
    if options.positions is not None:
        before = accumulate((record.num_generated for record in records), initial=0)
        pairs = zip(records, before, strict=False)
        records = [record for record, count in pairs if count < options.positions]
    if not records:
        raise CalibrationError(f"{data} holds no records.")
    if foreign := sum(record.temperature is None for record in records):
        progress.warn(
            f"{foreign} of {len(records)} texts have no sampling temperature, so they may not have "
            "been generated by the target. On other texts the accuracy of heads differs from that "
            "in serving; use records of `vllm-medusa distill`."
        )
    if len({record.temperature for record in records} - {None}) > 1:
        progress.warn(
            "the texts were sampled at several temperatures; estimates are for the mixture."
        )
    return records


def _trained_on(medusa: Mapping[str, Any]) -> set[str]:
    """SHA-256 of the files that the heads were trained on, from their config's "medusa"."""
    return {
        entry["data"][0]["sha256"]  # others are held out
        for entry in provenance_of(medusa)
        if entry.get("command", [])[1:2] == ["train"] and entry.get("data")
    }


def measure_accuracy(observations: Observations, walks: Walks) -> dict[str, Any]:
    """The fraction of labels at each rank of each head [K][R], and the number of labels [K].

    Head h is measured where ``walks`` of all texts reach an inner node of depth h, as decoding uses
    it only there; its accuracy there is far below the average over all positions. Plain JSON; a
    fraction is None where nothing was counted.
    """
    visited = walks.visited()
    reached = walks.jumps[visited] - 1  # depth at which each step stopped
    inner = {path[:-1] for path in walks.paths if path}
    has_child = np.array([path in inner for path in walks.paths])[walks.stops[visited]]
    width = observations.num_ranks
    accuracy: list[list[float | None]] = []
    counts: list[int] = []
    for head in range(observations.num_heads):
        # passed by a deeper step, or stopped at a node of this depth with children
        counted = (reached > head) | ((reached == head) & has_child)
        labels = walks.ranks[visited[counted], head]
        labels = labels[labels != NO_LABEL]
        counts.append(len(labels))
        hits = np.bincount(labels[labels < width], minlength=width).tolist()
        accuracy.append([round(hit / len(labels), 4) if len(labels) else None for hit in hits])
    return {"accuracy": accuracy, "counted_positions": counts}
