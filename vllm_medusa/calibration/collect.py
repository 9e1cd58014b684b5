"""Observations of many texts: batched, and resumable after a kill at any moment.

Texts are sorted by length and batched; each batch's observations are one file in a folder beside
the heads, written aside and renamed. The folder names what they depend on, so that a later run goes
on only where the same is asked for; it disappears when everything is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.confidence import Fit, fit_temperature
from vllm_medusa.calibration.observations import NO_LABEL, Observations, save_arrays
from vllm_medusa.calibration.observe import Array, Logits, Seen, observe
from vllm_medusa.files import FileRefused, read_json, write_json
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record

FOLDER = "calibration.part"  # beside the heads, while calibration runs
CLOSE_POSITIONS = 4096  # at which temperatures are fitted

HiddenStates = Callable[[Tensor, Tensor], Tensor]  # ids, mask [B, L] -> [B, L, H]
Span = tuple[int, int, int, int]  # text, first and last + 1 position, end of the span itself


def collect(
    texts: Sequence[Record],
    heads: MedusaHeads,
    hidden_states: HiddenStates,
    lm_head: Logits | None,
    folder: Path,
    *,
    num_ranks: int = 10,
    end_tokens: Collection[int] = (),
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
    depends_on: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
) -> tuple[Observations, list[Fit | None]]:
    """Observe all texts, and fit each head's temperature.

    Args:
        texts: the records, with the spans that the target wrote.
        heads: on ``device``.
        hidden_states: the target up to its LM head; texts are padded on the right.
        lm_head: the target's, for heads that store none.
        folder: the heads' folder, where batches are kept until all are done.
        num_ranks: R, choices of each head whose confidence is kept.
        end_tokens: ids after which the target writes nothing.
        batch_tokens: tokens of a forward pass, padding included (a longer text goes alone).
        device: where ids and masks are put.
        depends_on: what the observations depend on besides, as plain JSON values.
        progress: told of the positions that are done after every batch.

    Raises:
        CalibrationError: no text has a position.

    """
    spans = list(find_spans(texts, heads.num_heads, end_tokens))
    total = sum(stop - start for _, start, stop, _ in spans)
    if total == 0:
        raise CalibrationError(
            f"none of the {len(texts)} records has a generated span of more than "
            f"{heads.num_heads} tokens, as {heads.num_heads} heads need; generate longer texts."
        )
    stride = max(1, total // CLOSE_POSITIONS)
    settings = dict(depends_on or {}) | {
        "num_ranks": num_ranks,
        "batch_tokens": batch_tokens,
        "spans": len(spans),
        "positions": total,
    }
    work = _Work(folder / FOLDER, settings)
    by_text: dict[int, list[tuple[int, Span]]] = {}
    for number, span in enumerate(spans):
        by_text.setdefault(span[0], []).append((number, span))
    pieces: dict[int, dict[str, Array]] = {}  # by span
    done = 0
    for number, batch in enumerate(_batches(texts, list(by_text), batch_tokens)):
        members = [pair for text in batch for pair in by_text[text]]
        seen = work.load(number)
        if seen is None:
            seen = _observe_batch(
                texts, batch, members, heads, hidden_states, lm_head, num_ranks, stride, device
            )
            work.save(number, seen)
        pieces |= _pieces(seen, members, stride)
        done += len(seen.ranks)
        progress.at("positions", done, total)
    seen = Seen(
        **{
            field.name: np.concatenate([pieces[span][field.name] for span in range(len(spans))])
            for field in fields(Seen)
        }
    )
    observations = _observations(texts, spans, seen)
    fits = [
        fit_temperature(*(getattr(seen, name)[:, head] for name in _CLOSE))
        for head in range(heads.num_heads)
    ]
    return observations, fits


def remove_work(folder: Path) -> None:
    """Remove what `collect` kept, after its result is safe."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def find_spans(
    texts: Sequence[Record], num_heads: int, end_tokens: Collection[int] = ()
) -> Iterator[Span]:
    """Positions of every generated span that has any (see `observations`)."""
    for number, text in enumerate(texts):
        for start, end in text.generated:
            ended = text.token_ids[end - 1] in end_tokens
            stop = end - 2 if ended else end - num_heads - 1
            first = max(start - 1, 0)
            if stop > first:
                yield number, first, stop, end


def _batches(
    texts: Sequence[Record], chosen: Sequence[int], batch_tokens: int
) -> Iterator[list[int]]:
    batch: list[int] = []
    for text in sorted(chosen, key=lambda text: (len(texts[text].token_ids), text)):
        width = len(texts[text].token_ids)
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def _observe_batch(
    texts: Sequence[Record],
    batch: Sequence[int],
    members: Sequence[tuple[int, Span]],
    heads: MedusaHeads,
    hidden_states: HiddenStates,
    lm_head: Logits | None,
    num_ranks: int,
    stride: int,
    device: torch.device | str,
) -> Seen:
    longest = max(len(texts[text].token_ids) for text in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(batch):
        tokens = torch.tensor(texts[text].token_ids)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    with torch.inference_mode():
        states = hidden_states(ids.to(device), mask.to(device))  # [B, L, H]
    row_of = {text: row for row, text in enumerate(batch)}
    rows, labels, closely = [], [], []
    for number, (text, start, stop, end) in members:
        rows.append(states[row_of[text], start:stop])
        labels.append(_labels(texts[text], start, stop, end, heads.num_heads))
        closely.append(_closely(number, stop - start, stride))
    return observe(
        heads,
        torch.cat(rows),
        torch.cat(labels).to(device),
        num_ranks,
        lm_head,
        torch.cat(closely).to(device),
    )


def _labels(text: Record, start: int, stop: int, end: int, num_heads: int) -> Tensor:
    """int64 [T, K]: tokens t + h + 2 of the span, which ends before ``end``."""
    index = torch.arange(start, stop)[:, None] + torch.arange(num_heads) + 2
    ids = torch.tensor(text.token_ids)
    return torch.where(index < end, ids[index.clamp_max(len(ids) - 1)], NO_LABEL)


def _closely(number: int, count: int, stride: int) -> Tensor:
    """Mark every ``stride``-th position of a span, from another one on in each: bool [count]."""
    return (torch.arange(count) + number) % stride == 0


_CLOSE = ("own", "best", "partition", "first", "labelled")


def _pieces(
    seen: Seen, members: Sequence[tuple[int, Span]], stride: int
) -> dict[int, dict[str, Array]]:
    """Rows of a batch for each of its spans."""
    counts = [stop - start for _, (_, start, stop, _) in members]
    close = [
        int(_closely(number, count, stride).sum())
        for (number, _), count in zip(members, counts, strict=True)
    ]
    split = {
        name: np.split(rows, np.cumsum(close if name in _CLOSE else counts)[:-1])
        for name, rows in vars(seen).items()
    }
    return {
        number: {name: rows[place] for name, rows in split.items()}
        for place, (number, _) in enumerate(members)
    }


def _observations(texts: Sequence[Record], spans: Sequence[Span], seen: Seen) -> Observations:
    numbers: dict[str, int] = {}
    prompts = [numbers.setdefault(texts[text].prompt_key, len(numbers)) for text, *_ in spans]
    temperatures = [texts[text].temperature for text, *_ in spans]
    return Observations(
        ranks=seen.ranks,
        confidences=seen.confidences,
        offsets=np.cumsum([0, *(stop - start for _, start, stop, _ in spans)]).astype(np.int64),
        temperatures=np.array([np.nan if t is None else t for t in temperatures], np.float32),
        prompts=np.array(prompts, np.int64),
    )


class _Work:
    """The folder of finished batches."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        manifest = folder / "depends_on.json"
        with suppress(OSError, FileRefused):
            if read_json(manifest) == json.loads(json.dumps(settings)):
                return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(manifest, settings)

    def load(self, number: int) -> Seen | None:
        try:
            return Seen(**load_file(self._path(number)))
        except (FileNotFoundError, SafetensorError, TypeError):  # torn, if the machine went down
            return None

    def save(self, number: int, parts: Seen) -> None:
        save_arrays(self._path(number), vars(parts))

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:06}.safetensors"
