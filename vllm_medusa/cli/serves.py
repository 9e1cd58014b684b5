"""Whether vLLM would serve a target with trees: its start-up checks, without loading weights.

`python -m vllm_medusa.cli.serves TARGET FOLDER [DTYPE]` puts untrained heads into FOLDER and has
vLLM make an engine's configuration of them, which is where the plugin refuses what it can't serve.
That takes seconds, where finding it out after training takes hours.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_medusa.offline.quiet import stderr_to_log


def check(target: str, folder: Path, dtype: str) -> None:
    """Raise what vLLM, or the plugin, would raise when it starts.

    Raises:
        ValueError: it would be refused, with the reason.

    """
    import torch
    from transformers import AutoConfig
    from vllm import EngineArgs

    from vllm_medusa.heads import MedusaHeads, save_heads

    config = AutoConfig.from_pretrained(target).get_text_config()
    heads = MedusaHeads(
        1, 1, config.hidden_size, config.vocab_size, shared_lm_head=True, dtype=torch.bfloat16
    )
    save_heads(folder, heads)
    EngineArgs(
        model=target,
        dtype=dtype,
        speculative_config={"method": "medusa", "model": str(folder), "tree": [[0]]},
    ).create_engine_config()


def main() -> int:
    """Say whether it would be served; 0 or 2."""
    parser = argparse.ArgumentParser(prog="python -m vllm_medusa.cli.serves", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", nargs="?", default="auto")
    args = parser.parse_args()
    try:
        with stderr_to_log():
            os.dup2(2, 1)  # vLLM's own log
            check(args.target, args.folder, args.dtype)
    except (ValueError, OSError) as error:
        print(f"vLLM would not serve {args.target} with heads: {error}", file=sys.stderr)
        return 2
    print(f"vLLM will serve {args.target} with heads", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
