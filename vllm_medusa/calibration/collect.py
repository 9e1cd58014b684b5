"""Observations of many texts: batched, and resumable after a kill at any time.

Texts are sorted by length and batched; each batch's observations are one file in the folder of a
`vllm_medusa.files.Run` next to the heads, bound to the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.confidence import Fit, fit_temperature
from vllm_medusa.calibration.observations import NO_LABEL, Observations, save_arrays
from vllm_medusa.calibration.observe import Logits, Seen, observe
from vllm_medusa.files import Run
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.rows import pad

FOLDER = "calibration.part"  # next to the heads, while calibration runs
CLOSE_POSITIONS = 4096  # approximate number used to fit temperatures
_CLOSE = ("own", "best", "partition", "first", "labeled")

HiddenStates = Callable[[Tensor, Tensor], Tensor]  # ids, mask [B, L] -> [B, L, H]
Span = tuple[int, int, int, int]  # text, first and last + 1 position, end of the span


def collect(
    texts: Sequence[Record],  # with the spans that the target generated
    heads: MedusaHeads,  # on the device of ids and masks
    hidden_states: HiddenStates,  # the target up to its LM head; texts are padded on the right
    lm_head: Logits | None,  # the target's, if the heads store none
    run: Run,  # folder of batches until all are done
    *,
    num_ranks: int = 10,  # R, choices per head to record
    end_tokens: Collection[int] = (),  # end tokens of the target
    batch_tokens: int = 4096,  # per forward pass, padding included (longer texts run alone)
    progress: Progress = SILENT,
) -> tuple[Observations, list[Fit | None]]:
    """Observe all texts, and fit each head's temperature.

    Raises CalibrationError: no text has a position.
    """
    spans = list(find_spans(texts, heads.num_heads, end_tokens))
    total = sum(stop - start for _, start, stop, _ in spans)
    if total == 0:
        raise CalibrationError(
            f"none of the {len(texts)} records has a generated span of more than "
            f"{heads.num_heads} tokens, the minimum for these heads; generate longer texts."
        )
    close = [  # bool [positions] of each span: every n-th, with another offset in each
        (torch.arange(stop - start) + number) % max(1, total // CLOSE_POSITIONS) == 0
        for number, (_, start, stop, _) in enumerate(spans)
    ]
    by_text: dict[int, list[int]] = {}
    for number, (text, *_) in enumerate(spans):
        by_text.setdefault(text, []).append(number)
    parts: list[Seen] = []
    order: list[int] = []  # spans in order of observation
    done = 0
    for number, batch in enumerate(_batches(texts, list(by_text), batch_tokens)):
        members = [span for text in batch for span in by_text[text]]
        path = run.folder / f"batch-{number:06}.safetensors"
        seen = _load(path)
        if seen is None:
            chosen = [spans[n] for n in members]
            rows, labels = _rows(texts, batch, chosen, heads, hidden_states)
            after = torch.cat([_tokens(texts[s[0]], s, heads.num_heads, 1) for s in chosen])
            closely = torch.cat([close[n] for n in members]).to(rows.device)
            seen = observe(heads, rows, labels, num_ranks, lm_head, closely, after.to(rows.device))
            save_arrays(path, vars(seen))
        parts.append(seen)
        order += members
        done += len(seen.ranks)
        progress.at("positions", done, total)
    span_of = np.repeat(order, [len(close[n]) for n in order])  # of each observed row
    closely_seen = torch.cat([close[n] for n in order]).numpy()
    places = {
        name: np.argsort(span_of[closely_seen] if name in _CLOSE else span_of, kind="stable")
        for name in vars(parts[0])
    }
    seen = Seen(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])[place]
            for name, place in places.items()
        }
    )
    fits = [
        fit_temperature(*(getattr(seen, name)[:, head] for name in _CLOSE))
        for head in range(heads.num_heads)
    ]
    return _observations(texts, spans, seen), fits


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


def _rows(
    texts: Sequence[Record],
    batch: Sequence[int],  # text indices
    spans: Sequence[Span],  # of these texts
    heads: MedusaHeads,
    hidden_states: HiddenStates,
) -> tuple[Tensor, Tensor]:
    """States [n, H] and labels int64 [n, K] of the spans' positions."""
    device = next(heads.parameters()).device
    ids, mask = pad([texts[text].token_ids for text in batch])
    with torch.inference_mode():
        states = hidden_states(ids.to(device), mask.to(device))  # [B, L, H]
    rows = [states[batch.index(text), start:stop] for text, start, stop, _ in spans]
    labels = [_tokens(texts[span[0]], span, heads.num_heads, 2, NO_LABEL) for span in spans]
    return torch.cat(rows), torch.cat(labels).to(device)


def _tokens(
    text: Record, span: Span, num_heads: int, shift: int, outside: int | None = None
) -> Tensor:
    """int64 [T, K]: tokens t + h + ``shift``; after the span ``outside``, if given."""
    _, start, stop, end = span
    index = torch.arange(start, stop)[:, None] + torch.arange(num_heads) + shift
    ids = torch.tensor(text.token_ids)
    found = ids[index.clamp_max(len(ids) - 1)]
    return found if outside is None else torch.where(index < end, found, outside)


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


def _load(path: Path) -> Seen | None:
    try:
        return Seen(**load_file(path))
    except (FileNotFoundError, SafetensorError, TypeError):  # truncated by a crash of the machine
        return None
