"""Hooks on vLLM's engine arguments: the flag, the speculative config, the start-up checks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from types import ModuleType
from typing import Any

from vllm_medusa.config import (
    DEPTH,
    DRAFTER_METHODS,
    METHOD,
    WIDTH,
    MedusaConfigError,
    refuse_misspelled,
)
from vllm_medusa.integration.overrides import override
from vllm_medusa.tree.forms import did_you_mean

_OWN_KEYS = ("tree", "acceptance", "budget", "lookup", "shared_noise")
_TOO_FEW_TOKENS = "Consider increasing max_num_batched_tokens"  # vLLM's error for LoRA with drafts


def install(arg_utils: ModuleType) -> None:
    """Hook `EngineArgs` of ``vllm.engine.arg_utils``; a second call changes nothing."""
    engine_args = arg_utils.EngineArgs
    override(engine_args, "create_speculative_config", _create_speculative_config)
    override(engine_args, "create_engine_config", _create_engine_config)
    override(engine_args, "add_cli_args", _add_cli_args)
    override(engine_args, "from_cli_args", _from_cli_args)


def _create_speculative_config(
    original: Callable[..., Any], self: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    speculative = _mapping(self.speculative_config)
    method = self.spec_method or speculative.get("method")
    if method != METHOD and not (method in DRAFTER_METHODS and "tree" in speculative):
        _refuse_misplaced_keys(speculative, method)
        try:
            return original(self, target_model_config, target_parallel_config)
        except ValueError:
            _refuse_heads_without_method(speculative.get("model"), method)
            raise
    from vllm_medusa.integration import metrics, requests, stopping
    from vllm_medusa.integration.startup.eagle_options import config_of_eagle
    from vllm_medusa.integration.startup.options import config_of_heads, prepare

    for module in (requests, metrics, stopping):
        module.install()
    make = config_of_heads if method == METHOD else config_of_eagle
    return prepare(self, original, target_model_config, target_parallel_config, make)


def _mapping(value: Any) -> dict[str, Any]:
    """The speculative configuration as passed, or {}."""
    if not isinstance(value or {}, Mapping):
        raise MedusaConfigError(
            f"speculative_config is {value!r}; use an object such as "
            '{"method": "medusa", "model": "path/to/heads"}.'
        )
    return dict(value or {})


def _refuse_misplaced_keys(speculative: Mapping[str, Any], method: str | None) -> None:
    """Refuse our keys, also misspelled, with another method, and a misspelled "medusa"."""
    refuse_misspelled(method)
    ours = [key for key in _OWN_KEYS if key in speculative]
    if method in DRAFTER_METHODS:
        from vllm.config import SpeculativeConfig

        known = {each.name for each in fields(SpeculativeConfig)}
        for key in sorted(speculative.keys() - known - {*ours}):
            if guess := did_you_mean(key, _OWN_KEYS):
                raise MedusaConfigError(f"speculative_config has an unknown key {key!r}{guess}.")
        if ours:
            raise MedusaConfigError(
                f"speculative_config has {', '.join(map(repr, ours))}, which {method!r} supports "
                'only with a tree: add "tree": "dynamic".'
            )
    if ours:
        found = f"method is {method!r}" if method else "no method is set"
        raise MedusaConfigError(
            f"speculative_config has {', '.join(map(repr, ours))}, but "
            f'{found}. Trees need "method": "medusa", or "eagle", "eagle3" or "mtp" and a "tree".'
        )


def _refuse_heads_without_method(model: Any, method: str | None) -> None:
    """Refuse a folder of heads that vLLM could not read, because the method is missing."""
    from vllm_medusa.heads.checkpoint import peek_heads
    from vllm_medusa.heads.model import HeadsError

    with suppress(HeadsError):
        if method is None and isinstance(model, str) and os.path.isdir(model) and peek_heads(model):
            raise MedusaConfigError(
                f"speculative_config has no method, but {model} holds Medusa or Hydra heads. Add "
                '"method": "medusa".'
            )


def _create_engine_config(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        config = original(self, *args, **kwargs)
    except ValueError as error:
        if not (self.enable_lora and _TOO_FEW_TOKENS in str(error)):
            raise
        given = _mapping(self.speculative_config)
        method = self.spec_method or given.get("method")
        if method != METHOD and not (method in DRAFTER_METHODS and "tree" in given):
            raise
        _leave_room_for_adapters(self, method)
        config = original(self, *args, **kwargs)
    if self.speculative_config or self.spec_method:
        from vllm_medusa.integration.attention.cuda_graphs import capture_more_trees
        from vllm_medusa.integration.startup.checks import check_engine
        from vllm_medusa.integration.startup.options import TreeSettings, has_trees

        if has_trees(config.speculative_config):
            check_engine(config)
            capture_more_trees(self, config, TreeSettings.of(config).tree.num_nodes)
    return config


def _leave_room_for_adapters(engine_args: Any, method: str) -> None:
    """Limit the drafts per request, because vLLM's LoRA buffers limit the tokens of a step.

    Dynamic trees of EAGLE and MTP also become narrower, because vLLM counts the cache slots of
    their branches. vLLM has already set the defaults of max_num_batched_tokens and max_num_seqs.
    """
    tokens, requests = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    speculative = dict(engine_args.speculative_config or {})
    given = speculative.get("num_speculative_tokens", engine_args.spec_tokens)
    maximum = tokens // requests - 1
    own, fewest, lower = {"num_speculative_tokens": given or maximum}, 1, "num_speculative_tokens"
    needed = given and 1 + given
    if method != METHOD:
        from vllm_medusa.integration.startup.eagle_options import beam_of, scratch_of

        fewest, lower, needed = DEPTH - 1, "the tree's width or depth", None
        own["tree"] = {"width": min(WIDTH, maximum // fewest), "depth": DEPTH}
        if speculative["tree"] != "dynamic" or (given or 0) > maximum:
            tree = DRAFTER_METHODS[method].from_speculative_config(speculative).dynamic_tree
            needed = 1 + max(tree.num_draft_tokens, scratch_of(beam_of(tree)))
    if needed or maximum < fewest:
        raise MedusaConfigError(
            f"With LoRA adapters, vLLM needs max_num_batched_tokens ({tokens}) to be at least "
            f"max_num_seqs ({requests}) times the nodes of a tree, root included "
            f"({needed or f'{1 + fewest} or more'}). Raise max_num_batched_tokens, or lower "
            f"max_num_seqs or {lower}."
        )
    engine_args.speculative_config = speculative | own


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    if "--speculative-model" not in parser._option_string_actions:
        parser.add_argument(
            "--speculative-model",
            metavar="HEADS",
            default=None,
            help="Medusa or Hydra heads (folder, file or hub name) for tree speculation; the same "
            'as --speculative-config \'{"method": "medusa", "model": HEADS}\', whose other keys '
            "(tree, budget, lookup, acceptance, num_speculative_tokens) may be set too. Or "
            'an EAGLE drafter, with "tree": "dynamic".',
        )
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    heads = getattr(args, "speculative_model", None)
    if heads is not None:
        args = argparse.Namespace(**vars(args))
        args.speculative_config = _with_heads(heads, args)
    return original(cls, args)


def _with_heads(heads: str, args: argparse.Namespace) -> dict[str, Any]:
    """Merge the flag into ``--speculative-config``; conflicting flags are refused."""
    from vllm_medusa.heads.eagle_checkpoint import drafter_method  # imports torch, which is slow

    config = _mapping(getattr(args, "speculative_config", None))
    by_flag, by_config = getattr(args, "spec_method", None), config.get("method")
    found = drafter_method(heads, config.get("revision"))
    for flag, value in (
        ("--spec-model", getattr(args, "spec_model", None)),
        ("--speculative-config['model']", config.get("model")),
        ("--spec-method", None if by_flag == METHOD else by_flag),
        ("--speculative-config['method']", None if by_config in (METHOD, found) else by_config),
    ):
        if value is not None:
            raise MedusaConfigError(
                f"--speculative-model {heads} and {flag} = {value!r} conflict. Omit one "
                "of them; --spec-model is for other methods."
            )
    if by_flag or by_config == METHOD:
        return {**config, "model": heads} | ({} if by_flag else {"method": METHOD})
    own = {"method": METHOD} if found is None else {"method": found, "tree": "dynamic"}
    return {**own, **config, "model": heads}
