"""Hooks on vLLM's engine arguments: the flag, the speculative config, the start-up checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.worker.overrides import override

METHOD = "medusa"
EAGLE = ("eagle", "eagle3")  # with a "tree"; without one, only vLLM handles them
_CROWDED = "Consider increasing max_num_batched_tokens"  # vLLM's error for adapters with drafts


def install(arg_utils: ModuleType) -> None:
    """Hook `EngineArgs` of ``vllm.engine.arg_utils``; a second call changes nothing."""
    engine_args = arg_utils.EngineArgs
    override(engine_args, "create_speculative_config", _create_speculative_config)
    override(engine_args, "create_engine_config", _create_engine_config)
    override(engine_args, "add_cli_args", _add_cli_args)
    override(engine_args, "from_cli_args", _from_cli_args)


def _create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        speculative = _mapping(self.speculative_config)
        method = self.spec_method or speculative.get("method")
        if method != METHOD and not (method in EAGLE and "tree" in speculative):
            _refuse_lost_keys(speculative, method)
            return original(self, target_model_config, target_parallel_config)
        from vllm_medusa.worker.eagle import prepare_eagle
        from vllm_medusa.worker.metrics import install_metrics
        from vllm_medusa.worker.options import prepare
        from vllm_medusa.worker.requests import install_request_check
        from vllm_medusa.worker.stopping import install_stopping

        install_request_check()
        install_metrics()
        install_stopping()
        make = prepare if method == METHOD else prepare_eagle
        return make(self, original, target_model_config, target_parallel_config)

    return create_speculative_config


def _mapping(value: Any) -> dict[str, Any]:
    """The speculative configuration as passed, or {}."""
    if not isinstance(value or {}, Mapping):
        raise MedusaConfigError(
            f"speculative_config is {value!r}; use an object such as "
            '{"method": "medusa", "model": "path/to/heads"}.'
        )
    return dict(value or {})


def _refuse_lost_keys(speculative: Mapping[str, Any], method: str | None) -> None:
    """Refuse our keys, or a misspelled "medusa", with another method."""
    ours = [key for key in ("tree", "acceptance", "budget", "lookup") if key in speculative]
    if ours or (method is not None and method.strip().lower() == METHOD):
        found = f"method is {method!r}" if method else "no method is set"
        raise MedusaConfigError(
            f"speculative_config has {', '.join(map(repr, ours)) or 'a misspelled method'}, but "
            f'{found}. Trees need "method": "medusa", or "eagle" or "eagle3" and a "tree".'
        )


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            config = original(self, *args, **kwargs)
        except ValueError as error:
            if not (self.enable_lora and _CROWDED in str(error) and _asks_for_medusa(self)):
                raise
            _leave_room_for_adapters(self)
            config = original(self, *args, **kwargs)
        if self.speculative_config or self.spec_method:
            from vllm_medusa.worker.checks import check_engine
            from vllm_medusa.worker.cuda_graphs import capture_more_trees
            from vllm_medusa.worker.options import EngineOptions, is_medusa

            if is_medusa(config.speculative_config):
                check_engine(config)
                capture_more_trees(self, config, EngineOptions.of(config).tree.num_nodes)
        return config

    return create_engine_config


def _asks_for_medusa(engine_args: Any) -> bool:
    return METHOD in (engine_args.spec_method, (engine_args.speculative_config or {}).get("method"))


def _leave_room_for_adapters(engine_args: Any) -> None:
    """Limit the drafts per request: vLLM's LoRA buffers limit the tokens of a step.

    vLLM has already set its defaults of the other two numbers.
    """
    tokens, requests = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    speculative = dict(engine_args.speculative_config or {})
    given = speculative.get("num_speculative_tokens", engine_args.spec_tokens)
    maximum = tokens // requests - 1
    if given is not None or maximum < 1:
        raise MedusaConfigError(
            f"With LoRA adapters, vLLM needs max_num_batched_tokens ({tokens}) to be at least "
            f"max_num_seqs ({requests}) times the nodes of a tree, root included"
            + (f" ({given + 1})" if given is not None else " (2 or more)")
            + ". Raise the first or lower one of the others."
        )
    engine_args.speculative_config = speculative | {"num_speculative_tokens": maximum}


def _add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        if "--speculative-model" not in parser._option_string_actions:
            parser.add_argument(
                "--speculative-model",
                metavar="HEADS",
                default=None,
                help="Medusa heads (folder, file or hub name) for tree speculation; the same as "
                '--speculative-config \'{"method": "medusa", "model": HEADS}\', whose other keys '
                "(tree, budget, lookup, acceptance, num_speculative_tokens) may be set too. Or "
                'the folder of an EAGLE drafter, with "tree": "dynamic".',
            )
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        heads = getattr(args, "speculative_model", None)
        if heads is not None:
            args = argparse.Namespace(**vars(args))
            args.speculative_config = _with_heads(heads, args)
        return original(cls, args)

    return from_cli_args


def _with_heads(heads: str, args: argparse.Namespace) -> dict[str, Any]:
    """Merge the flag into ``--speculative-config``; conflicting flags are refused."""
    config = _mapping(getattr(args, "speculative_config", None))
    named = {
        "--spec-model": getattr(args, "spec_model", None),
        "--speculative-config['model']": config.get("model"),
    }
    methods = {
        "--spec-method": getattr(args, "spec_method", None),
        "--speculative-config['method']": config.get("method"),
    }
    for flag, value in named.items():
        if value is not None:
            raise MedusaConfigError(
                f"--speculative-model {heads} and {flag} = {value} both set the drafter; "
                "use one of them."
            )
    for flag, value in methods.items():
        if value not in (None, METHOD):
            raise MedusaConfigError(
                f"--speculative-model {heads} requests Medusa heads, but {flag} is {value!r}. "
                f"Omit {flag}, or pass that method's drafter as --spec-model."
            )
    from vllm_medusa.heads.eagle import drafter_method  # imports torch, which is slow

    if any(methods.values()):  # set on the command line
        return {**config, "model": heads} | ({} if methods["--spec-method"] else {"method": METHOD})
    method = drafter_method(heads)
    own = {"method": METHOD} if method is None else {"method": method, "tree": "dynamic"}
    return {**own, **config, "model": heads}
