"""The first stage: will vLLM serve the target with heads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_medusa.job import SILENT, Progress
from vllm_medusa.options import Dtype, Options, Source, option


class ServedOptions(Options):
    """Options of `check_served`."""

    target: Source = option("a folder or a hub name")
    dtype: Dtype = option("of the target", default="auto")


def check_served(options: ServedOptions, progress: Progress = SILENT) -> None:
    """Run vLLM's start-up checks on a target with untrained heads, without loading weights.

    The plugin refuses there what it can't serve. That takes seconds, where finding it out after
    training takes hours.

    Raises:
        ValueError: it would be refused, with the reason.

    """
    import torch
    from transformers import AutoConfig
    from vllm import EngineArgs

    from vllm_medusa.heads import MedusaHeads, save_heads

    config = AutoConfig.from_pretrained(options.target).get_text_config()
    heads = MedusaHeads(
        1, 1, config.hidden_size, config.vocab_size, shared_lm_head=True, dtype=torch.bfloat16
    )
    with TemporaryDirectory(prefix="vllm-medusa-") as folder:
        save_heads(Path(folder) / "heads", heads)
        speculation = {"method": "medusa", "model": f"{folder}/heads", "tree": [[0]]}
        try:
            EngineArgs(
                model=options.target, dtype=options.dtype, speculative_config=speculation
            ).create_engine_config()
        except (ValueError, OSError) as error:
            raise ValueError(f"vLLM would not serve {options.target} with heads: {error}") from None
