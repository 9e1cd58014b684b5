"""Observations of many texts: batched, and resumable after a kill at any time.

Texts are sorted by length, longest first, and batched; each batch's observations are one file in
the folder of a `vllm_medusa.files.Run` beside the heads, bound to the settings.
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
from vllm_medusa.calibration.observations import NO_LABEL, Observations, save_arrays
from vllm_medusa.calibration.observe import Logits, Seen, fit_temperature, observe
from vllm_medusa.files import Run
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record
from vllm_medusa.training.losses import IGNORED
from vllm_medusa.training.rows import labels_at, pad, split_passes, tokens_after

FOLDER = "calibration.part"  # next to the heads, while calibration runs
CLOSE_POSITIONS = 4096  # approximate number used to fit temperatures

HiddenStates = Callable[[Tensor, Tensor], Tensor]  # ids, mask [B, L] -> [B, L, H]
Span = tuple[int, int, int]  # text, first position, last + 1


def collect(
    texts: Sequence[Record],  # with the spans that the target generated
    heads: MedusaHeads,  # on the device of ids and masks
    hidden_states: HiddenStates,  # the target up to its LM head; texts are padded on the right
    lm_head: Logits | None,  # the target's, if the heads store none
    run: Run,  # folder of batches until all are done
    *,
    num_ranks: int = 10,  # R, choices per head that a tree may use
    end_tokens: Collection[int] = (),  # end tokens of the target
    batch_tokens: int = 4096,  # per forward pass, padding included (longer texts run alone)
    progress: Progress = SILENT,
) -> tuple[Observations, list[float | None]]:
    """Observe all texts, and fit each head's temperature; None: no labels.

    Raises CalibrationError: no text has a position.
    """
    numbers = {key: n for n, key in enumerate(dict.fromkeys(text.prompt_key for text in texts))}
    texts = sorted(texts, key=lambda text: -len(text.token_ids))  # as they are batched
    spans = list(find_spans(texts, heads.num_heads, end_tokens))
    total = sum(stop - start for _, start, stop in spans)
    if total == 0:
        raise CalibrationError(
            f"none of the {len(texts)} records has a generated span of more than "
            f"{heads.num_heads} tokens, the minimum for these heads; generate longer texts."
        )
    stride = max(1, total // CLOSE_POSITIONS)
    by_text: dict[int, list[Span]] = {}
    for span in spans:
        by_text.setdefault(span[0], []).append(span)
    parts: list[Seen] = []
    done = 0
    lengths = [len(text.token_ids) for text in texts]
    device, count = next(heads.parameters()).device, heads.num_heads
    for number, batch in enumerate(split_passes(list(by_text), lengths, batch_tokens)):
        path = run.folder / f"batch-{number:06}.safetensors"
        seen = _load(path)
        if seen is None:
            ids, mask = pad([texts[text].token_ids for text in batch])
            with torch.inference_mode():
                states = hidden_states(ids.to(device), mask.to(device))  # [B, L, H]
            where = [span for text in batch for span in by_text[text]]
            rows = torch.cat([states[batch.index(text), a:b] for text, a, b in where])
            labels = torch.cat([labels_at(texts[text], a, b, count) for text, a, b in where])
            labels = labels.masked_fill(labels == IGNORED, NO_LABEL).to(device)
            after = torch.cat([tokens_after(texts[text], a, b, count) for text, a, b in where])
            closely = torch.arange(done, done + len(rows), device=device) % stride == 0
            seen = observe(heads, rows, labels, lm_head, closely, after.to(device))
            save_arrays(path, seen._asdict())
        parts.append(seen)
        done += len(seen.ranks)
        progress.at("positions", done, total)
    seen = Seen(*map(np.concatenate, zip(*parts, strict=True)))
    fitted = [fit_temperature(seen.own[:, h], seen.partition[:, h]) for h in range(count)]
    temperatures = [texts[text].temperature for text, *_ in spans]
    observations = Observations(
        ranks=seen.ranks,
        offsets=np.cumsum([0, *(stop - start for _, start, stop in spans)]).astype(np.int64),
        temperatures=np.array([np.nan if t is None else t for t in temperatures], np.float32),
        prompts=np.array([numbers[texts[text].prompt_key] for text, *_ in spans], np.int64),
        num_ranks=num_ranks,
    )
    return observations, fitted


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
                yield number, first, stop


def _load(path: Path) -> Seen | None:
    try:
        return Seen(**load_file(path))
    except (FileNotFoundError, SafetensorError, TypeError):  # truncated by a crash of the machine
        return None
