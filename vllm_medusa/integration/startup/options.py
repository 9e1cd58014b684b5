"""Resolve the user's speculative config to engine options.

Everything is resolved in the process that builds the engine's config: the heads are inspected (not
loaded), the tree is chosen and checked. The result is passed as plain JSON in
``vllm_config.additional_config["medusa"]`` to every worker, which unpickles the config before any
plugin is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from vllm.config import SpeculativeConfig
from vllm.config.utils import config as config_class

from vllm_medusa.config import (
    DRAFTER_METHODS,
    AcceptanceConfig,
    MedusaConfig,
    MedusaConfigError,
    resolve_tree,
)
from vllm_medusa.heads.checkpoint import HeadsInfo, peek_heads
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.fingerprint import match_target
from vllm_medusa.heads.fit import require_fit
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.integration import compat
from vllm_medusa.plugin import version_problem
from vllm_medusa.tree import MAX_NODES, TokenTree
from vllm_medusa.tree.dynamic import BEAM_WIDTH, MOST_DRAFTS, Beam, DynamicTree, widest_pool

KEY = "medusa"
DRAFTER = "vllm_medusa.integration.drafters.medusa_drafter.MedusaDrafter"
V1_WORKER = "vllm_medusa.integration.v1.worker.MedusaCPUWorker"
V2_WORKER = "vllm_medusa.integration.v2.worker.MedusaWorker"
SCHEDULER = "vllm_medusa.integration.scheduling.scheduler.TreeScheduler"
ASYNC_SCHEDULER = "vllm_medusa.integration.scheduling.async_scheduler.TreeAsyncScheduler"
EITHER_SCHEDULER = "vllm_medusa.integration.scheduling.async_scheduler.tree_scheduler"
_SECONDS_TO_COMPARE = 1.0  # max time at start-up to read samples of the target's weights


@dataclass(frozen=True)
class TreeSettings:
    """The resolved and validated options for workers."""

    heads: str | None  # also an EAGLE drafter, or a target with MTP; None: only lookup
    revision: str | None
    tree: TokenTree | DynamicTree
    acceptance: AcceptanceConfig
    budget: Literal["auto"] | int | dict[str, int] | None = None  # None: a static tree
    taus: tuple[float, ...] = ()  # tokens per step with 1, 2, .. draft nodes; empty: unknown
    lookup: bool = False  # also draft from the request's own text
    shared_noise: bool = True  # choose drafts with the target's sampling noise

    @property
    def depth(self) -> int:
        """Max draft tokens that a step can accept per request."""
        maximum = self.tree.num_draft_tokens
        return maximum if self.lookup else min(self.tree.max_depth, maximum)

    @property
    def max_rows(self) -> int | None:
        """Running requests and drafts of a step above which no drafts are added."""
        return self.budget["max_rows"] if isinstance(self.budget, dict) else None

    @classmethod
    def of(cls, vllm_config: Any) -> TreeSettings:
        """Read the options of a config created by `prepare`."""
        return _PLAIN.validate_python(vllm_config.additional_config[KEY])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; `of` reads it back."""
        return _PLAIN.dump_python(self, mode="json")  # type: ignore[no-any-return]


_PLAIN = TypeAdapter(TreeSettings)


def has_trees(speculative_config: Any) -> bool:
    """Whether vLLM's speculative config was created by `prepare`, so that it has trees."""
    return hasattr(speculative_config, "medusa_acceptance")


def is_eagle(speculative_config: Any) -> bool:
    """Whether it is vLLM's config of an EAGLE drafter, or an MTP module, with our trees."""
    return has_trees(speculative_config) and speculative_config.method in DRAFTER_METHODS


def is_for_v2(speculative_config: Any) -> bool:
    """Whether the config was created for the V2 runner."""
    return bool(speculative_config.medusa_on_v2)


@config_class
class TreeSpeculativeConfig(SpeculativeConfig):
    """Drafts from heads; ``num_speculative_tokens`` counts draft nodes.

    The method is named ``draft_model``, because V2 refuses the name ``medusa``, and because V2 and
    the async scheduler leave drafts on the device only for a fixed list of methods, of which this
    is the simplest. There is no draft model: no layers, no KV cache and no slots.
    """

    def __post_init__(self) -> None:
        """Use the target's configs for the draft: heads have no config that vLLM can read."""
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    def uses_draft_model(self) -> bool:
        """False: heads are not a model, so nothing is reserved for one."""
        return False

    def __repr__(self) -> str:
        return f"TreeSpeculativeConfig(num_draft_nodes={self.num_speculative_tokens})"


CreateConfig = Callable[[dict[str, Any]], Any]  # vLLM's speculative config for other settings
# (engine arguments, vLLM's own function, model's and parallel config, whether on the V2 runner)
# -> the options, and vLLM's speculative config
MakeConfig = Callable[[Any, CreateConfig, Any, Any, bool], tuple[TreeSettings, Any]]


def prepare(
    engine_args: Any,
    original: Callable[..., Any],  # the replaced method
    model_config: Any,  # the target's
    parallel_config: Any,  # the target's
    make: MakeConfig,  # `config_of_heads` or `eagle_options.config_of_eagle`
) -> Any:
    """Replaces ``EngineArgs.create_speculative_config`` for trees.

    Returns vLLM's speculative config, with the acceptance rule and the runner as attributes.

    Raises MedusaConfigError, HeadsError, TreeError: all are `ValueError`, before weights load.
    """
    if problem := version_problem():
        raise MedusaConfigError(problem)
    on_v2 = compat.uses_v2_runner(parallel_config)
    compat.refuse_unsupported_platform(on_v2)
    if engine_args.async_scheduling and not on_v2:  # vLLM would refuse it without a remedy
        raise MedusaConfigError(
            "async scheduling is not supported on vLLM's V1 model runner. Disable it, or use the "
            "V2 runner (VLLM_USE_V2_MODEL_RUNNER=1)."
        )
    if compat.on_cuda():
        choose_triton_attention(engine_args)

    def create(settings: dict[str, Any]) -> Any:
        changed = copy.copy(engine_args)
        changed.speculative_config = settings
        changed.spec_method = changed.spec_model = changed.spec_tokens = None
        return original(changed, model_config, parallel_config)

    options, speculative = make(engine_args, create, model_config, parallel_config, on_v2)
    speculative.medusa_acceptance = options.acceptance.model_dump(mode="json")
    speculative.medusa_on_v2 = on_v2
    choose_worker(parallel_config, V2_WORKER if on_v2 else V1_WORKER)
    engine_args.scheduler_cls = engine_args.scheduler_cls or EITHER_SCHEDULER
    plain = {KEY: options.to_dict()}
    engine_args.additional_config = {**(engine_args.additional_config or {}), **plain}
    return speculative


def config_of_heads(
    engine_args: Any, create: CreateConfig, model_config: Any, parallel_config: Any, on_v2: bool
) -> tuple[TreeSettings, Any]:
    """The options for heads or lookup, and a config with one draft token per draft node.

    On V1 the config is for a custom proposer; on V2, which does not support these, it is of our own
    class. With a budget, many steps have no drafts. V2 captures full CUDA graphs for the lengths in
    its own draft-length schedule, so that schedule gets two: no drafts, and whole trees. Our
    scheduler sets the actual counts. With data-parallel replicas vLLM would ignore a schedule, with
    a warning.
    """
    options = resolve(MedusaConfig.from_speculative_config(merged(engine_args)), model_config)
    nodes = options.tree.num_draft_tokens
    settings = {"model": DRAFTER, "num_speculative_tokens": nodes}
    if not on_v2:
        return options, create({**settings, "method": "custom_class"})
    has_schedule = options.budget is not None and parallel_config.data_parallel_size == 1
    return options, TreeSpeculativeConfig(
        method="draft_model",
        num_speculative_tokens_per_batch_size=[(1, 1, nodes), (2, 2, 0)] if has_schedule else None,
        target_model_config=model_config,
        target_parallel_config=parallel_config,
        **settings,
    )


def resolve(config: MedusaConfig, model_config: Any) -> TreeSettings:
    """Inspect the heads, check them against the target and choose the tree."""
    if config.lookup and config.model is None:
        tree: TokenTree | DynamicTree = DynamicTree(TokenTree(()), _max_drafts(config) + 1)
        budget = config.budget or "auto"
        return TreeSettings(None, None, tree, config.acceptance, budget, lookup=True)
    source = config.model or model_config.model
    try:
        info = peek_heads(source, revision=config.revision)
    except HeadsError as error:
        if config.model is not None:
            raise
        raise HeadsError(
            f"{str(error).removesuffix('.')}. The target was searched for heads, because the "
            'speculative config has no "model": set it, or set "lookup": true to draft without '
            "heads."
        ) from None
    require_fit(info, model_config.get_hidden_size(), model_config.get_vocab_size())
    compare_targets(info.files, model_config)
    vocab_size = info.draft_vocab_size or model_config.get_vocab_size()
    if config.tree is None:
        tree = _dynamic(config, info, vocab_size)
    else:
        tree = resolve_tree(
            config.tree,
            heads_default=info.tree,
            num_heads=info.num_heads,
            vocab_size=vocab_size,
            max_draft_tokens=config.num_speculative_tokens,
        )
    return TreeSettings(
        heads=absolute(source),
        revision=config.revision,
        tree=tree,
        acceptance=config.acceptance,
        budget=(config.budget or "auto") if config.tree is None else None,
        taus=info.taus,
        lookup=config.lookup,
        shared_noise=config.shared_noise,
    )


def _dynamic(config: MedusaConfig, info: HeadsInfo, vocab_size: int) -> DynamicTree:
    """Dynamic trees from the user's options and the heads."""
    maximum = _max_drafts(config)
    pool: TokenTree | Beam = widest_pool(info.num_heads, vocab_size)
    if info.is_hydra:
        pool = Beam(BEAM_WIDTH, min(BEAM_WIDTH, vocab_size), info.num_heads)
    num_nodes = maximum + 1 if config.lookup else min(maximum + 1, pool.num_nodes)
    return DynamicTree(pool, num_nodes, info.sharpness)


def _max_drafts(config: MedusaConfig) -> int:
    """Max draft nodes per request."""
    if isinstance(config.budget, int):
        return min(config.num_speculative_tokens or MAX_NODES - 1, config.budget)
    return config.num_speculative_tokens or MOST_DRAFTS


def merged(engine_args: Any) -> dict[str, Any]:
    """The speculative config merged with vLLM's ``--spec-*`` flags, by vLLM's own rule."""
    merged = {
        key.replace("-", "_"): value
        for key, value in (engine_args.speculative_config or {}).items()
    }
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is None:
            continue
        if key in merged:
            raise MedusaConfigError(
                f"{flag} {value} and --speculative-config['{key}'] = {merged[key]!r} are "
                "the same option; use one of them."
            )
        merged[key] = value
    return merged


def compare_targets(drafter: CheckpointFiles, model_config: Any) -> None:
    """Warn if heads or a drafter have the fingerprint of another target, or can't be compared.

    The weights in the target's files are compared: LoRA adapters and quantization by vLLM
    are ignored, and quantized files can't be distinguished.
    """
    match = match_target(
        drafter,
        model_config.model,
        revision=getattr(model_config, "revision", None),
        seconds=_SECONDS_TO_COMPARE,
    )
    if match.warning:
        show = compat.logger.warning if match.verdict == "different" else compat.logger.info
        show("%s", match.warning)


def choose_worker(parallel_config: Any, ours: str) -> None:
    """Use our worker, unless the user set one; it must then derive from ours."""
    if parallel_config.worker_cls == "auto":
        parallel_config.worker_cls = ours
    elif not compat.derives_from(parallel_config.worker_cls, ours):
        raise MedusaConfigError(
            f"worker_cls is {parallel_config.worker_cls!r}, which can't verify trees. Omit "
            f"worker_cls, or derive your worker from {ours}."
        )


def choose_triton_attention(engine_args: Any) -> None:
    """Make vLLM select its Triton attention, which tree attention replaces on CUDA.

    Raises MedusaConfigError: the user selected another backend.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = engine_args.attention_config
    requested = [engine_args.attention_backend, config.backend, *config.backend_per_kind.values()]
    names = [str(getattr(backend, "name", backend)).upper() for backend in requested]
    others = [name for name in names if name not in ("NONE", "AUTO", "TRITON_ATTN")]
    if others:
        raise MedusaConfigError(
            f"attention backend {others[0]} was requested, which does not support trees. Medusa "
            "replaces vLLM's Triton attention on CUDA: omit the backend, or request "
            "TRITON_ATTN."
        )
    if config.backend is None:
        engine_args.attention_backend = AttentionBackendEnum.TRITON_ATTN
    compat.logger.warning_once(
        "Medusa's tree attention for CUDA was tested only with Triton's interpreter on CPUs, "
        "not on a GPU. Compare its greedy output with plain vLLM's before relying on it."
    )


def absolute(source: str) -> str:
    """Make a local path absolute for workers; hub names are unchanged."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source
