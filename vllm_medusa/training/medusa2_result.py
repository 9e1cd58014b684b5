"""What Medusa-2 leaves behind: a model and heads that fit it, measured as they will be served.

::

    HEADS/config.json, model.safetensors     the heads; config.json's "medusa" says how they fared
    HEADS/target/                            the new target: transformers' folder, tokenizer and all
    HEADS/target-degraded/                   the same where quality fell beyond the bounds
    HEADS/adapter/                           instead of it, with ``save="adapter"``

Merging rounds the weights to the target's dtype, so everything is measured once more on the merged
model, read back from its files. Nothing is lost where quality fell too far: the model is there, by
a name that says so.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.files import read_json, write_json
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.export import round_to, save_trained
from vllm_medusa.training.hidden_cache import CacheError, HiddenStates
from vllm_medusa.training.initial_heads import draft_lm_head
from vllm_medusa.training.joint_measure import JointMeasurement, measure_joint, states_of
from vllm_medusa.training.merging import merge_adapter
from vllm_medusa.training.options import QualityBounds
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target

MODEL, DEGRADED, ADAPTER = "target", "target-degraded", "adapter"


@dataclass(frozen=True)
class Medusa2Result:
    """Where everything is, and how it fared on held-out text.

    ``shortfalls`` says in words which bounds were broken; empty: none, or nothing was held out.
    """

    heads: Path
    model: Path | None
    adapter: Path | None
    measured: JointMeasurement | None
    shortfalls: tuple[str, ...]

    @property
    def degraded(self) -> bool:
        """Whether the target lost more quality than it may."""
        return bool(self.shortfalls)


def clear_results(output: Path) -> None:
    """Remove the models of an older run in ``output``, which a new one is about to replace."""
    for name in (MODEL, DEGRADED, ADAPTER):
        shutil.rmtree(output / name, ignore_errors=True)


def publish(
    run: TrainingRun,
    adapter: Path,
    heads: MedusaHeads,
    source: str | Path,
    original: HiddenStates | None,
    *,
    training: Mapping[str, Any],
    provenance: Mapping[str, Any],
    bounds: QualityBounds,
    save: str = "merged",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    heads_dtype: torch.dtype = torch.bfloat16,
    rows: int = 16384,
) -> Medusa2Result:
    """Merge, measure, and write the results; the heads' config.json, written last, completes them.

    The trained model should have been let go before: this loads two, one after the other.

    Args:
        run: the run's folder.
        adapter: folder of the trained adapter (`merging.save_adapter`).
        heads: the trained heads, rounded in place to what is stored.
        source: the original target.
        original: its states on held-out text; None: nothing is measured.
        training: what the heads' config.json says of the training; how it fared is added.
        provenance: the entry of this command.
        bounds: how much quality may be lost.
        save: "merged" or "adapter".
        dtype: what the merged model is measured in.
        device: where.
        heads_dtype: what is stored.
        rows: at most about so many held-out positions are measured.

    """
    merged = merge_adapter(source, adapter, run.work / "merged")
    round_to(heads, heads_dtype)
    measured = None
    shortfalls: list[str] = []
    if original is not None:
        target = Target.load(merged, dtype=dtype, device=device)
        heads = heads.to(target.device)
        try:
            measured = measure_joint(
                heads,
                draft_lm_head(target, heads),
                target,
                original,
                states_of(target, original.texts),
                rows=rows,
            )
            shortfalls = measured.quality.shortfalls(bounds)
        except CacheError as error:  # the new target computes NaN
            shortfalls = [str(error).removesuffix(".")]
        del target
    found = {} if measured is None else measured.to_dict()
    stored = plain_json(found)
    if stored != found and not shortfalls:
        shortfalls = ["not all that was measured is finite"]
    fared = {"degraded": bool(shortfalls), "shortfalls": shortfalls, **stored}
    output = run.output
    clear_results(output)
    model: Path | None = None
    kept: Path | None = None
    fingerprint = target_fingerprint(merged)
    if save == "adapter":
        kept = output / ADAPTER
        adapter.replace(kept)
        shutil.rmtree(merged)
    else:
        model = output / (DEGRADED if shortfalls else MODEL)
        config = merged / "config.json"
        write_json(config, {**read_json(config), "medusa_2": fared})
        merged.replace(model)
    save_trained(
        output,
        heads,
        model or source,
        dtype=heads_dtype,
        training={**training, "save": save, **fared},
        target=fingerprint,
        provenance=provenance,
    )
    return Medusa2Result(output, model, kept, measured, tuple(shortfalls))


def plain_json(value: Any) -> Any:
    """The same with None for NaN and infinity, for which JSON has no word."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
