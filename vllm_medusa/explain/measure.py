"""Step costs of an engine that is started for nothing else."""

from __future__ import annotations

from vllm_medusa.config import run_engines_in_this_process
from vllm_medusa.explain.options import ExplainOptions
from vllm_medusa.offline.engine import EngineSettings, Sampling, VllmEngine, medusa_config
from vllm_medusa.offline.quiet import stderr_to_log


def measure(options: ExplainOptions) -> None:
    """Start an engine, which times steps and keeps what they cost unless that is known; stop it.

    Raises:
        EngineRefused: vLLM or the plugin refuses what it was to be built from.

    """
    run_engines_in_this_process()
    asked = options.measured
    given = {
        "enforce_eager": asked.eager and asked.eager == "yes",
        "tensor_parallel_size": asked.tensor_parallel_size,
        "quantization": asked.quantization,
        "revision": asked.revision,
    }
    heads = medusa_config(
        options.heads,
        num_speculative_tokens=options.num_speculative_tokens,
        budget="auto",
        lookup=asked.lookup == "yes",
    )
    settings = EngineSettings(
        options.target,
        heads,
        asked.dtype or "auto",
        engine_args={k: v for k, v in given.items() if v is not None} | options.engine_args,
    )
    with stderr_to_log():
        engine = VllmEngine(settings, Sampling())
    engine.close()
