"""The first stage: will vLLM serve the target with heads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from vllm_medusa.job import SILENT, Progress
from vllm_medusa.options import Dtype, FromZero, Options, Source, option


class ServedOptions(Options):
    """Options of `check_served`."""

    target: Source = option("a folder or a hub name")
    drafter: Literal["medusa", "hydra", "eagle3"] = option(default="medusa")
    aux_layers: tuple[FromZero, ...] = option("of eagle3", default=())
    dtype: Dtype = option("of the target", default="auto")


def check_served(options: ServedOptions, progress: Progress = SILENT) -> None:
    """Run vLLM's start-up checks on a target with untrained heads, without loading weights.

    The plugin refuses there what it can't serve. That takes seconds, where finding it out after
    training takes hours.

    Raises:
        ValueError: it would be refused, with the reason.

    """
    from vllm import EngineArgs

    with TemporaryDirectory(prefix="vllm-medusa-") as folder:
        speculation = _untrained(options, Path(folder) / "heads")
        try:
            EngineArgs(
                model=options.target, dtype=options.dtype, speculative_config=speculation
            ).create_engine_config()
        except (ValueError, OSError) as error:
            raise ValueError(f"vLLM would not serve {options.target} with heads: {error}") from None


def _untrained(options: ServedOptions, folder: Path) -> dict[str, Any]:
    """Save heads, or a drafter, of the target's sizes; what vLLM is told of them."""
    import torch
    from transformers import AutoConfig

    from vllm_medusa.heads import MedusaHeads, save_heads
    from vllm_medusa.heads.checkpoint import save_drafter
    from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape, choose_layers
    from vllm_medusa.heads.hydra import HydraHeads

    config = AutoConfig.from_pretrained(options.target).get_text_config()
    hidden, vocab, dtype = config.hidden_size, config.vocab_size, torch.bfloat16
    told: dict[str, Any] = {"method": "medusa", "model": str(folder), "tree": [[0]]}
    if options.drafter == "eagle3":
        layers = choose_layers(options.aux_layers, config.num_hidden_layers)
        shape = EagleShape.of(config, layers, hidden, vocab)
        save_drafter(folder, EagleDrafter(shape, 1, torch.arange(min(64, vocab))).to(dtype))
        return told | {"method": "eagle3", "tree": "dynamic"}
    if options.drafter == "hydra":
        save_heads(folder, HydraHeads(1, 1, hidden, vocab, num_lm_heads=0, dtype=dtype))
    else:
        save_heads(folder, MedusaHeads(1, 1, hidden, vocab, shared_lm_head=True, dtype=dtype))
    return told
