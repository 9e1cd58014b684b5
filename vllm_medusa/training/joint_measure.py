"""Heads and quality on held-out text, both from one pass of the model as it is now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.losses import LMHead
from vllm_medusa.training.quality import Quality, QualityMeter
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Piece, Texts
from vllm_medusa.training.workers import Workers

_BATCH_ROWS = 4096
_DIVERGED = (
    "So the new target, which is being trained, diverged: use a smaller --backbone-rate or "
    "--heads-weight."
)


@dataclass(frozen=True)
class JointMeasurement:
    """``heads`` as `Measurement.summary` gives it, and the target beside the original."""

    heads: dict[str, Any]
    quality: Quality

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"heldout": self.heads, "quality": self.quality.to_dict()}


def states_of(target: Target, texts: Texts) -> HiddenStates:
    """States that are computed whenever they are read: of a model that changes."""
    return HiddenStates(
        target,
        texts,
        Path(),
        {},
        dtype=torch.float32,
        max_bytes=0,
        file="held-out text",
        remedy=_DIVERGED,
    )


def release_target(states: HiddenStates) -> HiddenStates:
    """Forget the model that made ``states``, all of which are kept in files; returns them.

    Raises:
        ValueError: some would have to be computed.

    """
    if states.missing() or states.cached_bytes < states.needed_bytes:
        raise ValueError("the original's held-out states have to be kept whole, and built")
    cast(Any, states).target = SimpleNamespace(hidden_size=states.target.hidden_size)
    return states


def measure_joint(
    heads: MedusaHeads,
    draft_head: LMHead,  # the target's over the heads' draft vocabulary
    target: Target,  # its LM head is the original's and the new model's
    original: HiddenStates,  # of the original model
    now: HiddenStates,  # of the new one, of the same texts
    *,
    workers: Workers | None = None,  # share the spans; None: this process measures alone
    rows: int = 16384,  # at most about so many positions, evenly spread over the spans
) -> JointMeasurement:
    """Measure heads and target on the spans of ``original.texts``.

    Raises:
        QualityError: the texts hold no generated token.

    """
    texts = original.texts
    sizes = np.diff(texts.first_row)
    stride = -(-int(sizes.sum()) // max(1, rows))
    spans = list(range(0, len(sizes), max(1, stride)))
    if workers is not None:
        spans = spans[workers.rank :: workers.world]
    device = target.device
    total = Measurement.empty(heads.num_heads)
    meter = QualityMeter(target.lm_head, target.lm_head)
    while spans:
        batch: list[int] = []
        while spans and (not batch or int(sizes[batch].sum()) < _BATCH_ROWS):
            batch.append(spans.pop())
        wanted = [(span, 0, int(sizes[span])) for span in batch]
        before, after = (s.read(wanted).to(device) for s in (original, now))  # [n, H]
        following, labels = (t.to(device) for t in _labels(texts, batch, heads.num_heads))
        meter.add(following, before, after)
        total.measure(heads, after, labels, draft_head)
    packed = torch.cat([meter.packed(), total.packed()])
    if workers is not None:
        packed = workers.add_up(packed.to(device)).cpu()
    meter.unpack(packed)
    summed = Measurement.unpacked(packed[len(meter.packed()) :], heads.num_heads)
    return JointMeasurement(summed.summary(), meter.result())


def _labels(texts: Texts, spans: list[int], num_heads: int) -> tuple[Tensor, Tensor]:
    """All rows of some spans: the next tokens int64 [n], the heads' labels int64 [n, K]."""
    following, labels = [], []
    for span in spans:
        size = int(texts.first_row[span + 1] - texts.first_row[span])
        base = texts.first_id[texts.span_record[span]] + texts.span_position[span]
        following.append(torch.from_numpy(texts.ids[base + 1 : base + 1 + size].astype(np.int64)))
        whole = Piece(span, 0, size - 1)  # "soft" adds the last row, which has no label
        labels.append(torch.from_numpy(texts.labels(whole, num_heads, soft=True)))
    return torch.cat(following), torch.cat(labels)
