"""EAGLE and MTP with trees: options, and checks that refuse unsupported configurations.

vLLM keeps its own method and config, which determine the drafter's config, its auxiliary
hidden states, its KV cache, and the slots reserved after a request's tokens
(`num_lookahead_tokens`, the config's ``num_speculative_tokens``). Drafting and verification are
ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

from vllm.config import SpeculativeConfig

from vllm_medusa.config import DRAFTER_METHODS, EagleConfig, MedusaConfigError
from vllm_medusa.heads.eagle_checkpoint import doubtful_layers, named_layers, require_eagle
from vllm_medusa.heads.eagle_tensors import MIN_WINDOW, P_EAGLE, Layout
from vllm_medusa.heads.files import find_checkpoint, find_target
from vllm_medusa.heads.fit import NO
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.heads.mtp import MTP_MODULES, check_tensors
from vllm_medusa.integration import compat
from vllm_medusa.integration.startup.options import (
    CreateConfig,
    TreeSettings,
    absolute,
    compare_targets,
    merged,
)
from vllm_medusa.tree.dynamic import Beam, DynamicTree, widest_pool


def config_of_eagle(
    engine_args: Any, create: CreateConfig, model_config: Any, parallel_config: Any, on_v2: bool
) -> tuple[TreeSettings, Any]:
    """The options for EAGLE or MTP, and vLLM's own config for it; see `options.prepare`."""
    settings = merged(engine_args)
    method = settings.pop("method")
    config = DRAFTER_METHODS[method].from_speculative_config(settings)
    tree, beam = config.dynamic_tree, beam_of(config.dynamic_tree)
    revision = config.revision
    if isinstance(config, EagleConfig):
        layout = check_checkpoint(config, method, model_config, beam.width)
        if layout.kind == P_EAGLE:
            tree = parallel_tree(tree, lookup=config.lookup)
            beam = beam_of(tree)
    else:
        check_module(model_config)
        revision = model_config.revision
    options = TreeSettings(
        heads=absolute(config.model or model_config.model),
        revision=revision,
        tree=tree,
        acceptance=config.acceptance,
        budget=config.budget or (tree.num_draft_tokens if config.tree == "chain" else "auto"),
        lookup=config.lookup,
        shared_noise=config.shared_noise,
    )
    maximum = max(tree.num_draft_tokens, scratch_of(beam))  # reserved cache slots
    settings = {"method": method, "num_speculative_tokens": maximum}
    # Else each prefix hit is one block shorter than plain vLLM's. The block's last entry depends on
    # the token after it: it is another's if texts differ right there, which affects drafts only.
    settings["disable_eagle_block_drop"] = True
    settings |= {} if config.model is None else {"model": config.model}  # None: the target
    if on_v2:  # full CUDA graphs for steps without drafts too, see `config_of_heads`
        if parallel_config.data_parallel_size == 1:
            settings["num_speculative_tokens_per_batch_size"] = [(1, 1, maximum), (2, 2, 0)]
    else:  # accepted tokens are known on the host before drafting
        settings["disable_padded_drafter_batch"] = True
    backend = engine_args.attention_backend or engine_args.attention_config.backend
    if backend is not None and model_config.use_mla:  # vLLM would choose the module's itself
        settings["attention_backend"] = backend
    if revision is not None:
        settings["revision"] = revision
    speculative = create(settings)
    if speculative.parallel_drafting:
        raise MedusaConfigError(
            f'{config.model} uses parallel drafting, which trees do not support. Omit "tree".'
        )
    return options, speculative


def check_checkpoint(config: EagleConfig, method: str, model_config: Any, width: int) -> Layout:
    """Return a drafter's layout; refuse one for another target, or an untested one."""
    target = {
        "hidden_size": model_config.get_hidden_size(),
        "vocab_size": model_config.get_vocab_size(),
        "num_layers": model_config.hf_text_config.num_hidden_layers,
    }
    label = config.model
    try:
        found = require_eagle(label, config.revision, method, model_config.model, target)
    except HeadsError as error:
        raise MedusaConfigError(f"{str(error).rstrip('.')}.") from None
    if width > (known := found.drafter.draft_vocab_size):
        raise MedusaConfigError(
            f"The tree's width is {width}, but the drafter in {label} has {known} "
            "tokens. Use a narrower tree."
        )
    compare_targets(find_checkpoint(label, config.revision), model_config)
    return found.drafter


def check_module(model_config: Any) -> None:
    """Refuse a target without a supported MTP module; vLLM's rules decide which module it has."""
    name, target = model_config.model, model_config.hf_config
    draft = SpeculativeConfig.hf_config_override(copy.deepcopy(target))
    kind, count = draft.architectures[0], getattr(draft, "n_predict", None)
    if kind == target.architectures[0]:
        raise MedusaConfigError(
            f"{name} ({kind}) has no MTP module that vLLM supports. Use a drafter, for example "
            '"method": "eagle3", or another target.'
        )
    modules = [module for module in MTP_MODULES.values() if module.kind == kind]
    if not modules:
        raise MedusaConfigError(
            f"{name} ({target.architectures[0]}) has an MTP module of type {kind}; trees support "
            f'only the modules of {", ".join(MTP_MODULES)}. Omit "tree" to use vLLM\'s own MTP.'
        )
    if count != 1:
        raise MedusaConfigError(
            f"{name} has num_nextn_predict_layers = {count}; trees need exactly one MTP module. "
            + ('Omit "tree" to use vLLM\'s own MTP.' if count else "Use another checkpoint.")
        )
    types, window = getattr(draft, "layer_types", None), min(_windows(draft), default=MIN_WINDOW)
    slides = "sliding_attention" in types if types else getattr(draft, "use_sliding_window", True)
    if window < MIN_WINDOW and slides:
        raise MedusaConfigError(
            f"The MTP module of {name} has a sliding window of {window}; trees need at least "
            f'{MIN_WINDOW}. Omit "tree" to use vLLM\'s own MTP.'
        )
    try:
        files = find_target(name, model_config.revision)
    except (HeadsError, OSError):
        return  # not downloaded yet, or in a format that only vLLM reads
    check = check_tensors(files, modules[0], target.num_hidden_layers)
    if check.verdict == NO:
        raise MedusaConfigError(f"{name}: {check.text}.")


def _windows(config: Any) -> list[int]:
    """All sliding windows in a target's config, of K-EXAONE's per layer too."""
    lists = (getattr(config, f"{of}sliding_windows", None) or [] for of in ("", "mtp_"))
    return [*filter(None, [getattr(config, "sliding_window", None), *chain.from_iterable(lists)])]


def scratch_of(beam: Beam) -> int:
    """Cache slots after a request's tokens for drafting: one per expanded node."""
    return sum(map(beam.width_at, range(1, beam.depth)))


def parallel_tree(tree: DynamicTree, *, lookup: bool) -> DynamicTree:
    """The tree of a P-EAGLE drafter, whose levels are independent: a pool instead of a beam."""
    beam = beam_of(tree)
    pool = widest_pool(beam.depth, beam.choices)
    return DynamicTree(pool, tree.num_nodes if lookup else min(tree.num_nodes, pool.num_nodes))


def beam_of(tree: Any) -> Beam:
    """The beam of a drafter with a KV cache; P-EAGLE runs one entry per level."""
    assert isinstance(tree, DynamicTree)
    if isinstance(tree.pool, Beam):
        return tree.pool
    return Beam(1, max(tree.pool.head_widths), tree.max_depth)


def reads_layers(speculative: Any) -> bool:
    """Whether a drafter reads hidden states of several of the target's layers, by vLLM's rule."""
    extra = getattr(speculative.draft_model_config.hf_config, "eagle_config", None) or {}
    return speculative.method == "eagle3" and bool(extra.get("use_aux_hidden_state", True))


def check_captured_layers(model: Any, speculative: Any) -> None:
    """Log which hidden states of the loaded target the drafter reads; refuse wrong ones."""
    while not hasattr(model, "aux_hidden_state_layers"):
        inner = getattr(model, "language_model", None) or getattr(model, "model", None)
        if inner is None:
            raise MedusaConfigError(
                f"{type(model).__name__} does not support EAGLE-3 in vLLM. Omit the drafter."
            )
        model = inner
    captured, draft = tuple(model.aux_hidden_state_layers), speculative.draft_model_config.hf_config
    named = named_layers(vars(draft))
    if named is not None and tuple(sorted(named)) != captured:
        raise MedusaConfigError(
            f"The drafter was trained on the target's layers {sorted(named)}, but vLLM passes "
            f"{list(captured)}."
        )
    compat.logger.info(
        "EAGLE-3 drafts from the inputs of the target's layers %s, %s.",
        ", ".join(map(str, captured)),
        "from the drafter's config" if named else "vLLM's default; its config has none",
    )
    if doubt := doubtful_layers(vars(draft)):
        compat.logger.warning("The drafter: %s.", doubt)


def unsupported_by_eagle(config: Any) -> Iterator[str]:
    """Yield reasons to refuse the finished config, in addition to those for heads."""
    model, scheduler = config.model_config, config.scheduler_config
    replicas = config.parallel_config.data_parallel_size
    tree = TreeSettings.of(config).tree
    assert isinstance(tree, DynamicTree)
    beam, in_one_pass = beam_of(tree), not isinstance(tree.pool, Beam)
    scratch = scratch_of(beam)
    width = max(scratch, 1) if in_one_pass else beam.width
    if replicas > 1 and model.is_moe:
        yield (
            f"data_parallel_size is {replicas}: replicas of a mixture of "
            "experts run each forward pass together, but only some of them draft. Use 1."
        )
    if model.enable_prompt_embeds:
        yield "prompt embeddings have no token ids, which EAGLE and MTP read. Disable them."
    if model.is_multimodal_model or model.uses_mrope:
        yield f"{model.model} is multimodal, which trees of EAGLE or MTP do not support yet."
    rows, maximum = scheduler.max_num_seqs * width, scheduler.max_num_batched_tokens
    if rows > maximum:
        yield (
            f"a pass of {scheduler.max_num_seqs} requests (max_num_seqs) with {width} entries each "
            f"has {rows} rows; a step has at most {maximum} (max_num_batched_tokens). Lower "
            f"max_num_seqs or the tree's {'depth' if in_one_pass else 'width'}, or raise "
            "max_num_batched_tokens."
        )
    if config.num_lookahead_tokens < scratch or scratch >= model.max_model_len:
        yield (
            f"the branches of a tree of width {beam.width} and depth {beam.depth} need {scratch} "
            f"cache slots after a request's tokens. vLLM reserves {config.num_lookahead_tokens}, "
            f"and max_model_len is {model.max_model_len}. Use a narrower or shallower tree."
        )
