"""Observations of many texts: batched, and resumable after a kill at any time.

Texts are sorted by length, longest first, and batched; each batch's observations are one file in
the folder of a `vllm_medusa.files.Run` beside the heads, bound to the settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.observations import NO_LABEL, Observations, save_arrays
from vllm_medusa.calibration.observe import Seen, fit_temperature, observe
from vllm_medusa.files import Run
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.rows import IGNORED, Piece, Texts, split_passes

FOLDER = "calibration.part"  # next to the heads, while calibration runs
CLOSE_POSITIONS = 4096  # approximate number used to fit temperatures


def collect(
    records: Sequence[Record],  # with the spans that the target generated
    heads: MedusaHeads,  # on the target's device
    target: Any,  # a `Target`
    run: Run,  # folder of batches until all are done
    *,
    num_ranks: int = 10,  # R, choices per head that a tree may use
    batch_tokens: int = 4096,  # per forward pass, padding included (longer texts run alone)
    progress: Progress = SILENT,
) -> tuple[Observations, list[float | None]]:
    """Observe all texts, and fit each head's temperature; None: no labels.

    Raises CalibrationError: no text has a position.
    """
    numbers = {key: n for n, key in enumerate(dict.fromkeys(r.prompt_key for r in records))}
    texts = Texts(sorted(records, key=lambda record: -len(record.token_ids)))  # as in batches
    spans = list(find_spans(texts, heads.num_heads, target.end_tokens))
    total = sum(span.num_rows for span in spans)
    if total == 0:
        raise CalibrationError(
            f"none of the {len(records)} records has a generated span of more than "
            f"{heads.num_heads} tokens, the minimum for these heads; generate longer texts."
        )
    stride = max(1, total // CLOSE_POSITIONS)
    by_text: dict[int, list[Piece]] = {}
    for span in spans:
        by_text.setdefault(texts.record_of(span.start), []).append(span)
    weight = next(heads.parameters())
    lengths = [len(record.token_ids) for record in texts.records]
    hidden = HiddenStates(
        target, texts, spans, dtype=weight.dtype, max_bytes=0, forward_tokens=batch_tokens
    )
    parts: list[Seen] = []
    done = 0
    for number, batch in enumerate(split_passes(list(by_text), lengths, batch_tokens)):
        path = run.folder / f"batch-{number:06}.safetensors"
        seen = _load(path)
        if seen is None:
            where = [(span.start, span.stop) for text in batch for span in by_text[text]]
            rows = torch.cat([torch.arange(*span) for span in where])
            states = hidden.read(where).to(weight)
            labels = texts.labels(rows, heads.num_heads)
            labels = labels.masked_fill(labels == IGNORED, NO_LABEL).to(weight.device)
            closely = torch.arange(done, done + len(rows), device=weight.device) % stride == 0
            after = texts.after(rows, heads.num_heads).to(weight.device)
            lm_head = target.lm_head if heads.shared_lm_head else None
            seen = observe(heads, states, labels, lm_head, closely, after)
            save_arrays(path, seen._asdict())
        parts.append(seen)
        done += len(seen.ranks)
        progress.at("positions", done, total)
    seen = Seen(*map(np.concatenate, zip(*parts, strict=True)))
    fitted = [fit_temperature(seen.own[:, h], seen.partition[:, h]) for h in range(heads.num_heads)]
    of = [texts.records[text] for text, own in by_text.items() for _ in own]  # of each span
    heats = [np.nan if record.temperature is None else record.temperature for record in of]
    observations = Observations(
        ranks=seen.ranks,
        offsets=np.cumsum([0, *(span.num_rows for span in spans)]).astype(np.int64),
        temperatures=np.array(heats, np.float32),
        prompts=np.array([numbers[record.prompt_key] for record in of], np.int64),
        num_ranks=num_ranks,
    )
    return observations, fitted


def find_spans(texts: Texts, num_heads: int, end_tokens: Collection[int] = ()) -> Iterator[Piece]:
    """Positions of every generated span that has any (see `observations`)."""
    for first, record in zip(texts.first.tolist(), texts.records, strict=False):
        for start, end in record.generated:
            ended = record.token_ids[end - 1] in end_tokens
            stop = first + (end - 2 if ended else end - num_heads - 1)
            if stop > (begin := first + max(start - 1, 0)):
                yield Piece(begin, stop, stop)


def _load(path: Path) -> Seen | None:
    try:
        return Seen(**load_file(path))
    except (FileNotFoundError, SafetensorError, TypeError):  # truncated by a crash of the machine
        return None
