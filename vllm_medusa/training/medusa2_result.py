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
from pathlib import Path
from typing import Any

from vllm_medusa.files import read_json, write_json
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.export import round_to, save_trained
from vllm_medusa.training.hidden_cache import DTYPES, CacheError, HiddenStates
from vllm_medusa.training.initial_heads import target_lm_head
from vllm_medusa.training.job import Job
from vllm_medusa.training.joint_measure import measure_joint, states_of
from vllm_medusa.training.merging import merge_adapter
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target

MODEL, DEGRADED, ADAPTER = "target", "target-degraded", "adapter"


def clear_results(output: Path) -> None:
    """Remove the models of an older run in ``output``, which a new one is about to replace."""
    for name in (MODEL, DEGRADED, ADAPTER):
        shutil.rmtree(output / name, ignore_errors=True)


def publish(
    job: Job,
    run: TrainingRun,  # with the trained adapter in ``work/adapter``
    heads: MedusaHeads,  # rounded in place to what is stored
    original: HiddenStates,  # the original target's on held-out text
    trained: Mapping[str, Any],  # for the heads' config.json, beside settings and how it fared
    origin: Mapping[str, Any],  # the heads' provenance
) -> None:
    """Merge, measure, and write the results; the heads' config.json, written last, completes them.

    The trained model should have been released before: this loads two, one after the other.
    """
    joint, dtype = job.options.joint, DTYPES[job.options.heads.save_dtype]
    adapter, output = run.work / "adapter", run.output
    merged = merge_adapter(job.inputs.source, adapter, run.work / "merged")
    round_to(heads, dtype)
    found, shortfalls = _measured(job, merged, heads, original)
    stored = plain_json(found)
    if stored != found and not shortfalls:
        shortfalls = ["not all that was measured is finite"]
    fared = {"degraded": bool(shortfalls), "shortfalls": shortfalls, **stored}
    clear_results(output)
    base: str | Path = job.inputs.source
    fingerprint = target_fingerprint(merged)
    if joint.save == "adapter":
        adapter.replace(output / ADAPTER)
        shutil.rmtree(merged)
    else:
        base = output / (DEGRADED if shortfalls else MODEL)
        config = merged / "config.json"
        write_json(config, {**read_json(config), "medusa_2": fared})
        merged.replace(base)
    save_trained(
        output,
        heads,
        base,
        dtype=dtype,
        training={**job.settings, **trained, **fared},
        target=fingerprint,
        provenance=origin,
    )


def _measured(
    job: Job, merged: Path, heads: MedusaHeads, original: HiddenStates
) -> tuple[dict[str, Any], list[str]]:
    """What was measured, and in words which bounds were broken."""
    target = Target.load(merged, dtype=job.dtype, device=job.workers.device)
    heads = heads.to(target.device)
    now = states_of(target, original.texts)
    try:
        found = measure_joint(heads, target_lm_head(target, heads.token_map), target, original, now)
    except CacheError as error:  # the new target computes NaN
        return {}, [str(error).removesuffix(".")]
    return found.to_dict(), found.quality.shortfalls(job.options.joint.bounds)


def plain_json(value: Any) -> Any:
    """The same with None for NaN and infinity, for which JSON has no word."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
