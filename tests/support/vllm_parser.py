"""The parser of `vllm serve`, wherever the installed vLLM keeps it."""

from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def server_parser() -> Any:
    """A parser of all options of a server, `--model` included."""
    return make_arg_parser(FlexibleArgumentParser())
