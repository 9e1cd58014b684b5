"""One calibration: records to what was seen of the heads, saved beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.accuracy import Accuracy, measure_accuracy
from vllm_medusa.calibration.collect import collect, remove_work
from vllm_medusa.calibration.confidence import Fit
from vllm_medusa.calibration.loading import check_folder, load
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.options import CalibrateOptions
from vllm_medusa.calibration.pictures import check_picture, draw_calibration
from vllm_medusa.calibration.search import walked_tree
from vllm_medusa.calibration.summary import summarise
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.config import resolve_tree
from vllm_medusa.heads import match_target, peek_heads, target_fingerprint, update_config
from vllm_medusa.heads.files import digest_heads, find_checkpoint
from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.offline.records import Record, load_records
from vllm_medusa.training.inputs import find_tokenizer
from vllm_medusa.training.target import Target
from vllm_medusa.tree import TokenTree

WALKED_NODES = 63


@dataclass(frozen=True)
class Calibrated:
    """What was seen, and what follows from it."""

    observations: Observations  # as saved beside the heads
    accuracy: Accuracy
    fits: list[Fit | None]  # the temperature of each head; None without labels
    tree: TokenTree  # what the walks decoded with
    tau: float  # tokens per step of those walks
    summary: dict[str, Any]  # what the heads' config.json keeps


def calibrate(
    options: CalibrateOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Calibrated:
    """Measure heads on texts, and save what was seen beside them.

    Killed, the same call goes on where it stopped.

    Raises:
        ValueError: heads, records or a target that can't be used, or that don't go together.

    """
    check_folder(options.heads)
    if options.plot:
        check_picture(options.plot)
    info = peek_heads(options.heads)
    given = options.tree and resolve_tree(options.tree, None, info.num_heads, info.draft_vocab_size)
    if warning := match_target(info, options.model, heads=options.heads).warning:
        progress.warn(warning)
    records = _read(options, progress)
    target, heads, dtype = load(options.model, options.heads, options.machine)
    _check_ids(records, target, options)
    if options.top_k > heads.draft_vocab_size:
        raise CalibrationError(
            f"--top-k is {options.top_k}; the heads score {heads.draft_vocab_size} tokens. Take "
            "fewer."
        )
    origin = provenance(command, [options.data])
    if origin["data"][0]["sha256"] in _trained_on(info.config):
        progress.warn(
            f"the heads were trained on {options.data}: they are right on it more often than they "
            "will be. Calibrate on records held out, such as training/heldout.jsonl beside the "
            "heads."
        )
    source = {
        "target": target_fingerprint(options.model),
        "heads": digest_heads(find_checkpoint(options.heads)),
        "data": origin["data"],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": options.machine.quantization,
    }
    observations, fits = collect(
        records,
        heads,
        target.hidden_states,
        target.lm_head if heads.shared_lm_head else None,
        options.heads,
        num_ranks=options.top_k,
        end_tokens=target.end_tokens,
        batch_tokens=options.batch_tokens,
        depends_on=source
        | {name: getattr(options, name) for name in ("limit", "positions", "temperature")},
        progress=progress,
    )
    observations.source.update(source)
    texts = observations.texts()
    progress.at("walking the texts", 0, 1)
    tree = given or TokenTree.from_paths(walked_tree(texts, WALKED_NODES, options.top_k))
    progress.at("walking the texts", 1, 1)
    accuracy = measure_accuracy(observations, tree.paths)
    summary = summarise(observations, accuracy, fits, tree)
    observations.save(options.heads)
    update_config(options.heads, calibration=summary, provenance=origin)
    remove_work(options.heads)
    if options.plot:
        draw_calibration(options.plot, observations, accuracy)
    return Calibrated(observations, accuracy, fits, tree, Walks(texts, tree.paths).tau(), summary)


def _read(options: CalibrateOptions, progress: Progress) -> list[Record]:
    """The records asked for; says what is unusual about them."""
    data = options.data
    tokenizer = find_tokenizer(options.model)
    records, bad = load_records(data, tokenizer, max_tokens=options.max_text_tokens)
    settle_bad_lines(data, bad, options.on_bad_line, progress)
    if options.temperature is not None:
        found = sorted({r.temperature for r in records if r.temperature is not None})
        records = [record for record in records if record.temperature == options.temperature]
        if not records:
            shown = ", ".join(f"{t:g}" for t in found) or "none"
            raise CalibrationError(
                f"{data} has no record of temperature {options.temperature:g}; it has {shown}."
            )
    records = _first(records[: options.limit], options.positions)
    if not records:
        raise CalibrationError(f"{data}: no records in it.")
    if foreign := sum(record.temperature is None for record in records):
        progress.warn(
            f"{foreign} of {len(records)} texts don't say at which temperature the target wrote "
            "them, so they may not be its own. Heads are right more or less often on such text "
            "than when they are served; use records of `vllm-medusa distill`."
        )
    if len({record.temperature for record in records} - {None}) > 1:
        progress.warn(
            "the texts were sampled at several temperatures; expected values are of the mixture. "
            "--temperature T takes those of one."
        )
    return records


def _first(records: list[Record], positions: int | None) -> list[Record]:
    """The first records, up to the one with which they have so many generated tokens."""
    if positions is None:
        return records
    before = accumulate((record.num_generated for record in records), initial=0)
    return [record for record, count in zip(records, before, strict=False) if count < positions]


def _check_ids(records: Sequence[Record], target: Target, options: CalibrateOptions) -> None:
    """Refuse records of another vocabulary or longer than the target can read."""
    config = target.model.config.get_text_config()
    room = getattr(config, "max_position_embeddings", None)
    for record in records:
        where = f"{options.data}, line {record.line}"
        if max(record.token_ids) >= target.vocab_size:
            raise CalibrationError(
                f"{where}: token {max(record.token_ids)} is outside the target's vocabulary of "
                f"{target.vocab_size}; was it made with another target?"
            )
        if room is not None and len(record.token_ids) > room:
            raise CalibrationError(
                f"{where}: {len(record.token_ids)} tokens, and the target has {room} positions. "
                f"Leave such texts out: --max-text-tokens {room} --on-bad-line skip."
            )


def _trained_on(config: Mapping[str, Any]) -> set[str]:
    """SHA-256 of the files that the heads were trained on, as their config says."""
    extra = config.get("medusa")
    entries = extra.get("provenance") if isinstance(extra, Mapping) else None
    return {
        entry["data"][0]["sha256"]  # further ones are held out
        for entry in (entries if isinstance(entries, list) else [])
        if entry.get("command", [])[1:2] == ["train"] and entry.get("data")
    }
