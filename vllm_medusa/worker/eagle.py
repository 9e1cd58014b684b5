"""EAGLE drafters with trees: options, and checks that refuse configurations with wrong results.

vLLM keeps its own method and config, which determine the drafter's config, its auxiliary
hidden states, its KV cache, and the slots reserved after a request's tokens
(`num_lookahead_tokens`, the config's ``num_speculative_tokens``). Drafting and verifying are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from vllm_medusa.config import EagleConfig, MedusaConfigError
from vllm_medusa.heads.eagle import (
    LAYER_IDS,
    bare_names,
    default_layers,
    doubtful_layers,
    flat_config,
    inspect_eagle,
    named_layers,
    not_for_trees,
)
from vllm_medusa.heads.files import CheckpointFiles, find_checkpoint
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.worker import compat
from vllm_medusa.worker.options import EngineOptions, absolute, merged, with_speculation


def config_of_eagle(
    engine_args: Any,
    original: Callable[..., Any],
    model_config: Any,
    parallel_config: Any,
    on_v2: bool,
) -> tuple[EngineOptions, Any]:
    """The options for an EAGLE drafter, and vLLM's own config for it; see `options.prepare`."""
    settings = merged(engine_args)
    method = settings.pop("method")
    if engine_args.enable_lora:
        raise MedusaConfigError(
            "LoRA adapters have not been tested with EAGLE trees. Omit one of them."
        )
    config = EagleConfig.from_speculative_config(settings)
    try:
        inspect_eagle(config.model, revision=config.revision)
    except HeadsError as error:
        raise MedusaConfigError(
            f'{error}. Medusa and Hydra heads need "method": "medusa".'
        ) from None
    tree = config.grown
    options = EngineOptions(
        heads=absolute(config.model),
        revision=config.revision,
        tree=tree,
        acceptance=config.acceptance,
        budget=config.budget or (tree.num_draft_tokens if config.tree == "chain" else "auto"),
        lookup=config.lookup,
        shared_noise=config.shared_noise,
    )
    maximum = max(tree.num_draft_tokens, scratch_of(beam_of(tree)))  # reserved cache slots
    settings = {"method": method, "model": config.model, "num_speculative_tokens": maximum}
    if on_v2:  # full CUDA graphs for steps without drafts too, see `tree_speculative_config`
        settings["num_speculative_tokens_per_batch_size"] = [(1, 1, maximum), (2, 2, 0)]
    else:  # accepted tokens are known on the host before it drafts
        settings["disable_padded_drafter_batch"] = True
    if config.revision is not None:
        settings["revision"] = config.revision
    changed = with_speculation(engine_args, settings)
    speculative = original(changed, model_config, parallel_config)
    checkpoint = find_checkpoint(config.model, config.revision)
    check_checkpoint(checkpoint, speculative, model_config, tree)
    return options, speculative


def check_checkpoint(
    files: CheckpointFiles, speculative: Any, model_config: Any, tree: DynamicTree
) -> None:
    """Refuse a drafter for another target, or an untested one."""
    draft, label = speculative.draft_model_config.hf_config, files.label
    if speculative.parallel_drafting:
        raise MedusaConfigError(
            f'{label} uses parallel drafting, which trees do not support. Omit "tree".'
        )
    of_target = getattr(draft, "target_hidden_size", None) or draft.hidden_size
    for name, found, needed in (
        ("hidden size", of_target, model_config.get_hidden_size()),
        ("vocabulary", draft.vocab_size, model_config.get_vocab_size()),
    ):
        if found != needed:
            raise MedusaConfigError(
                f"The drafter in {label} is for targets with {name} {found}, the target "
                f"{model_config.model} has {needed}. Use the target that it was trained on, or a "
                "drafter trained for this one."
            )
    draft_vocab = getattr(draft, "draft_vocab_size", None) or draft.vocab_size
    width = beam_of(tree).width
    if width > draft_vocab:
        raise MedusaConfigError(
            f"The tree's width is {width}, but the drafter in {label} has {draft_vocab} "
            "tokens. Use a narrower tree."
        )
    names = bare_names(files)
    for reason in not_for_trees(flat_config(files.config), names, speculative.method):
        raise MedusaConfigError(f"The drafter in {label} {reason}.")
    if draft_vocab != draft.vocab_size and "d2t" not in names:
        raise MedusaConfigError(
            f"The drafter in {label} has {draft_vocab} of {draft.vocab_size} tokens, but no "
            '"d2t". The checkpoint is incomplete.'
        )
    if speculative.method == "eagle3":
        num_layers = model_config.hf_text_config.num_hidden_layers
        inputs = len(check_auxiliary_layers(draft, num_layers, label)) * of_target
    else:
        inputs = 2 * of_target
    for name, shape in (
        ("fc.weight", (draft.hidden_size, inputs)),
        ("d2t", (draft_vocab,)),
        ("lm_head.weight", (draft_vocab, draft.hidden_size)),
    ):
        if name in names:
            found = files.specs([names[name]])[names[name]].shape
            if found != shape:
                raise MedusaConfigError(
                    f"{name} in {label} has the shape {list(found)}; with its config and this "
                    f"target it would be {list(shape)}. It belongs to another target, or to "
                    "another method."
                )
        elif name == "fc.weight":
            raise MedusaConfigError(f'{label} has no "{name}"; it is not an EAGLE drafter.')


def scratch_of(beam: Beam) -> int:
    """Cache slots after a request's tokens for drafting: one per expanded node."""
    return sum(map(beam.width_at, range(1, beam.depth)))


def beam_of(tree: Any) -> Beam:
    """The beam of an EAGLE drafter."""
    assert isinstance(tree, DynamicTree) and isinstance(tree.pool, Beam)
    return tree.pool


def check_auxiliary_layers(draft: Any, num_layers: int, label: str) -> tuple[int, ...]:
    """The target's layers whose inputs the drafter reads; their number must match the drafter.

    Layer 0's input is the embeddings; ``num_layers`` means the last layer's output.

    """
    extra = getattr(draft, "eagle_config", None) or {}
    named = named_layers(vars(draft))
    layers = tuple(named or default_layers(num_layers))
    wanted = getattr(draft, "num_aux_hidden_states", None) or len(extra.get(LAYER_IDS) or "123")
    right = all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in layers)
    if not right or len(set(layers)) != wanted or len(layers) != wanted:
        source = "its config has" if named else "its config has none; vLLM's default is"
        raise MedusaConfigError(
            f"The drafter in {label} reads {wanted} hidden states of the target; {source} the "
            f"layers {list(layers)}; {wanted} distinct ones from 0 to {num_layers} are needed"
            f'. Set "{LAYER_IDS}" in its config.json to the layers that it was trained on.'
        )
    return layers


def check_captured_layers(model: Any, speculative: Any) -> None:
    """Log which hidden states of the loaded target the drafter reads; refuse wrong ones."""
    while not hasattr(model, "aux_hidden_state_layers"):
        inner = getattr(model, "language_model", None) or getattr(model, "model", None)
        if inner is None:
            raise MedusaConfigError(
                f"{type(model).__name__} does not support EAGLE-3 in vLLM. Omit it."
            )
        model = inner
    shown, draft = tuple(model.aux_hidden_state_layers), speculative.draft_model_config.hf_config
    named = named_layers(vars(draft))
    if named is not None and tuple(sorted(named)) != shown:
        raise MedusaConfigError(
            f"The drafter was trained on the target's layers {sorted(named)}, but vLLM passes "
            f"{list(shown)}."
        )
    compat.logger.info(
        "EAGLE-3 drafts from the inputs of the target's layers %s, %s.",
        ", ".join(map(str, shown)),
        "from the drafter's config" if named else "vLLM's default; its config has none",
    )
    if doubt := doubtful_layers(vars(draft)):
        compat.logger.warning("The drafter: %s.", doubt)


def check_vocabulary(target_ids: Tensor, vocab_size: int) -> None:
    """Refuse a draft vocabulary that is not part of the target's: int64 [V_draft]."""
    known = int(target_ids.unique().numel())
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= vocab_size or known != len(target_ids):
        raise MedusaConfigError(
            f'The drafter\'s "d2t" has token ids from {low} to {high}, {known} distinct ones '
            f"for {len(target_ids)} draft tokens; the target has {vocab_size}. It belongs to "
            "another target, or is damaged."
        )


def unsupported_by_eagle(config: Any) -> Iterator[str]:
    """Yield reasons to refuse the finished config, in addition to those for heads."""
    model, parallel, scheduler = (
        config.model_config,
        config.parallel_config,
        config.scheduler_config,
    )
    beam = beam_of(EngineOptions.of(config).tree)
    scratch = scratch_of(beam)
    if parallel.data_parallel_size > 1:
        yield (
            f"data_parallel_size is {parallel.data_parallel_size}; EAGLE trees have not been "
            "tested with replicas. Use 1."
        )
    if model.enable_prompt_embeds:
        yield "prompt embeddings have no token ids, which EAGLE reads. Disable them."
    if model.is_multimodal_model or model.uses_mrope:
        yield f"{model.model} is multimodal, which EAGLE trees do not support yet."
    rows, maximum = scheduler.max_num_seqs * beam.width, scheduler.max_num_batched_tokens
    if rows > maximum:
        yield (
            f"a level of {scheduler.max_num_seqs} requests (max_num_seqs) with {beam.width} nodes "
            f"each has {rows} rows; a step has at most {maximum} (max_num_batched_tokens). Lower "
            "the first, or the tree's width, or raise the last."
        )
    if config.num_lookahead_tokens < scratch or scratch >= model.max_model_len:
        yield (
            f"the branches of a tree of width {beam.width} and depth {beam.depth} need {scratch} "
            f"cache slots after a request's tokens. vLLM reserves {config.num_lookahead_tokens}, "
            f"and max_model_len is {model.max_model_len}. Use a narrower or shallower tree."
        )
