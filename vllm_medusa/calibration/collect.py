"""Observations of many texts, resumable after a kill at any time.

The target's hidden states are stored as in training, in the folder of a `vllm_medusa.files.Run`
next to the heads, for these settings only. A resumed run computes the missing ones, and runs the
heads again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.observations import NO_LABEL, Observations
from vllm_medusa.calibration.observe import Observed, fit_temperature, observe
from vllm_medusa.files import Run, free_bytes
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.rows import IGNORED, Piece, Texts

FOLDER = "calibration.part"  # next to the heads, while calibration runs
FIT_POSITIONS = 4096  # approximate number used to fit temperatures
NUM_RANKS = 10  # choices per head that a tree may use, as in dynamic trees


def collect(
    records: Sequence[Record],  # with the spans that the target generated
    heads: MedusaHeads,  # on the target's device
    target: Any,  # a `Target`
    run: Run,  # folder of the hidden states
    *,
    batch_tokens: int = 4096,  # per forward pass, padding included (longer texts run alone)
    progress: Progress = SILENT,
) -> tuple[Observations, list[float | None]]:
    """Observe all texts, and fit each head's temperature; None: no labels.

    Raises CalibrationError: no text has a position.
    """
    numbers = {key: n for n, key in enumerate(dict.fromkeys(r.prompt_key for r in records))}
    texts = Texts(sorted(records, key=lambda record: -len(record.token_ids)))  # for less padding
    spans = list(find_spans(texts, heads.num_heads, target.end_tokens))
    total = sum(span.num_rows for span in spans)
    if total == 0:
        raise CalibrationError(
            f"none of the {len(records)} records has a generated span of more than "
            f"{heads.num_heads} tokens, the minimum for these heads; generate longer texts."
        )
    weight = next(heads.parameters())
    hidden = HiddenStates(
        target,
        texts,
        spans,
        run.folder,
        dtype=weight.dtype,
        max_bytes=free_bytes(run.folder) // 2,  # other states are computed when they are read
        shard_bytes=batch_tokens * target.hidden_size * weight.dtype.itemsize,
        forward_tokens=batch_tokens,
    )
    hidden.build(lambda ready, total: progress.at("hidden states", ready, total))
    stride = max(1, total // FIT_POSITIONS)
    lm_head = target.lm_head if heads.shared_lm_head else None
    parts: list[Observed] = []
    done = 0
    for span in spans:
        rows = torch.arange(span.start, span.stop)
        states = hidden.read([(span.start, span.stop)]).to(weight)
        labels = texts.labels(rows, heads.num_heads)
        labels = labels.masked_fill(labels == IGNORED, NO_LABEL).to(weight.device)
        fit = torch.arange(done, done + len(rows), device=weight.device) % stride == 0
        after = texts.after(rows, heads.num_heads).to(weight.device)
        parts.append(observe(heads, states, labels, lm_head, fit, after))
        done += len(rows)
        progress.at("positions", done, total)
    seen = Observed(*map(np.concatenate, zip(*parts, strict=True)))
    fitted = [fit_temperature(seen.own[:, h], seen.partition[:, h]) for h in range(heads.num_heads)]
    of = [texts.records[texts.record_of(span.start)] for span in spans]
    temperatures = [np.nan if record.temperature is None else record.temperature for record in of]
    observations = Observations(
        ranks=seen.ranks,
        offsets=np.cumsum([0, *(span.num_rows for span in spans)]).astype(np.int64),
        temperatures=np.array(temperatures, np.float32),
        prompts=np.array([numbers[record.prompt_key] for record in of], np.int64),
        num_ranks=min(NUM_RANKS, heads.draft_vocab_size),
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
