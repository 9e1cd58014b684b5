"""EAGLE-3's drafter on a frozen target, by training-time test (https://arxiv.org/abs/2503.01840).

    loss = sum over s = 1 ... K of decay^s * mean cross-entropy of step s at t + s + 1

The steps of the chain below a row are like heads at that row (see `EagleDrafter`), with the same
labels and weights. But entries attend to earlier ones, prompts included, so a training step takes
whole texts, split every `PIECE_ROWS` rows; tokens after a split do not attend to those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vllm_medusa.heads.eagle_checkpoint import inspect_drafter
from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape
from vllm_medusa.heads.eagle_tensors import bare_names, flat_config, rope_of
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.fit import NO
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.training.method import Batch, Method
from vllm_medusa.training.target import Target, TargetError

PIECE_ROWS = 2048
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")  # names of a target's final norm
EMBEDDING_SHARE = 0.3  # initial scale of the weights on embeddings
_REMEDY = "Train a new drafter, without --start-heads"


class Eagle3(Method):
    """Trains a drafter on whole texts; the target is unchanged.

    The drafter uses the target's embedding; the states of the texts come from `AuxiliaryStates`.
    """

    heads: EagleDrafter

    def __init__(self, target: Target, drafter: EagleDrafter, *setup: Any) -> None:
        super().__init__(drafter, *setup)
        drafter.lm_head.requires_grad_(not drafter.frozen_lm_head)
        drafter.embedding = target.embedding_weight.detach()
        self.teacher = target.lm_head_of(dtype=torch.bfloat16 if self.bf16 else torch.float32)
        self.width = target.hidden_size

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Method`."""
        device, states, sizes = self.workers.device, self.states(batch), batch.sizes
        features, last = states.split([states.shape[1] - self.width, self.width], 1)
        valid = pad_sequence([torch.ones(n, dtype=torch.bool) for n in sizes], batch_first=True)
        texts = batch.data.texts
        first = [start - texts.first[texts.record_of(start)] for start, _ in batch.spans]
        x = self.heads(
            pad_sequence(list(features.split(sizes)), batch_first=True),
            pad_sequence(list(self.path(batch).split(sizes)), batch_first=True),
            torch.tensor(first, device=device),
        )
        return last, x[valid.to(device)]


def new_drafter(
    target: Target,
    layers: Sequence[int],  # target layers whose inputs it reads
    num_steps: int,
    token_map: Tensor | None,
    *,
    frozen_lm_head: bool,
    seed: int,
) -> EagleDrafter:
    """An untrained drafter initialized from the target's last decoder layer, norm and LM head.

    The decoder layer reads the deepest of the features as the target's layer does. The token's
    embedding, which is not an input of the target's layer, gets small weights. Weights whose name
    or shape differs stay random.
    """
    config = target.model.config.get_text_config()
    shape = EagleShape.of(config, layers, target.hidden_size, target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = EagleDrafter(shape, num_steps, token_map)
    rows = slice(None) if token_map is None else token_map
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.lm_head_weight[rows].float() * target.logit_scale)
        found = (getattr(target.backbone, name, None) for name in _NORMS)
        if norm := next((norm for norm in found if norm is not None), None):
            signs = torch.ones_like(target.embedding_weight[:1])  # an RMS of 1, a mean of 0
            signs[:, 1::2] = -1
            drafter.norm.weight.copy_((signs * (norm(signs) - norm(-signs)))[0] / 2)
        _start_from(dict(decoder_layers(target)[-1].named_parameters()), drafter)
    drafter.frozen_lm_head = frozen_lm_head
    return drafter


def load_drafter(
    target: Target, files: CheckpointFiles, layers: Sequence[int], num_steps: int
) -> EagleDrafter:
    """Load a drafter of one Llama layer for this target, to continue its training.

    Its shape is that of its own config, which may be EAGLE-3.1's or have speculators' residual. Its
    LM head is trained unless its rows equal the target's.

    Raises HeadsError: it belongs to another target, or its tensors have another layout.
    """
    label, config = files.label, flat_config(files.config)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    for check in inspect_drafter(files, sizes).checks:
        if check.verdict == NO or check.name == "numbers of layers":
            raise HeadsError(f"{label}: {check.name}: {check.text}. {_REMEDY}")
    types, rope = config.get("layer_types") or (), rope_of(config)
    untrained = {
        "norm_before_fc": config.get("norm_before_fc"),
        "sliding_window": "sliding_attention" in types,
        "rope_type": rope["rope_type"] != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name, found in untrained.items():
        if found:
            raise HeadsError(f"{label} has {name}, which `train` does not support. {_REMEDY}")
    names = bare_names(files)
    stored = dict(files.finite_tensors(names.values()))
    found = {name.replace("layers.0.", "midlayer."): stored[key] for name, key in names.items()}
    offsets = found.pop("d2t", None)
    found.pop("t2d", None)
    embedding, own = target.embedding_weight, found.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, embedding[: len(own)].to(own.dtype).cpu()):
        raise HeadsError(f'{label}: its "embed_tokens.weight" is not the target\'s. {_REMEDY}')
    token_map = None if offsets is None else offsets.long() + torch.arange(len(offsets))
    shape = EagleShape.of(SimpleNamespace(**config), layers, target.hidden_size, target.vocab_size)
    drafter = EagleDrafter(shape, num_steps, token_map)
    try:
        drafter.load_state_dict(found if token_map is None else found | {"token_map": token_map})
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:40])
        raise HeadsError(
            f"{label} does not have the layout that `train` writes: {reason}. {_REMEDY}"
        ) from None
    rows = target.lm_head_weight[slice(None) if token_map is None else token_map].float()
    same = (rows * target.logit_scale).to(found["lm_head.weight"].dtype)
    drafter.frozen_lm_head = torch.equal(same.cpu(), found["lm_head.weight"])
    return drafter


def _start_from(layer: dict[str, Tensor], drafter: EagleDrafter) -> None:
    hidden, own = drafter.shape.hidden_size, drafter.midlayer
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:].fill_diagonal_(1.0)
    if "input_layernorm.weight" in layer:
        layer["hidden_norm.weight"] = layer.pop("input_layernorm.weight")
    for name, weight in own.named_parameters():
        given, state = layer.get(name), weight
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):  # input: an embedding and a state
            embedding, state = weight.split(hidden, -1)
            embedding.mul_(EMBEDDING_SHARE)
        if given is not None and given.shape == state.shape and given.is_floating_point():
            state.copy_(given)


def decoder_layers(target: Target) -> Sequence[nn.Module]:
    """The target's decoder layers.

    Raises TargetError: it has no list with the config's number of layers.
    """
    found = getattr(target.backbone, "layers", None)
    if found is None:
        found = getattr(target.backbone, "h", None)
    count = getattr(target.model.config.get_text_config(), "num_hidden_layers", None)
    if found is None or len(found) != count:
        raise TargetError(
            "EAGLE-3 reads the inputs of decoder layers, but "
            f"{type(target.model).__name__} has no plain list of decoder layers. Train Medusa or "
            "Hydra heads for it."
        )
    return found  # type: ignore[no-any-return]


class AuxiliaryStates:
    """A target whose states are (A + 1) H wide: the inputs of A layers and of its LM head.

    Layers are numbered as in vLLM: 0 means the inputs of layer 0, the embeddings; the number of
    layers means the last layer's output, before the final norm. Used like a `Target` by
    `HiddenStates`.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        """TargetError: see `decoder_layers`."""
        self.target, self.layers = target, tuple(sorted(layers))
        self.state_names = (*(f"layer-{layer}" for layer in self.layers), *target.state_names)
        self.hidden_size = len(self.state_names) * target.hidden_size
        self.device = target.device
        self._last_layer = decoder_layers(target)[-1]

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """For ids int64 [B, L], padded on the right: [B, L, (A + 1) H], see `Target`."""
        last: list[Any] = []  # transformers returns the last layer's output normed
        hook = self._last_layer.register_forward_hook(lambda _, __, output: last.append(output))
        try:
            out = self.target.run(ids, attention_mask, output_hidden_states=True)
        finally:
            hook.remove()
        unnormed = last[0][0] if isinstance(last[0], tuple) else last[0]
        inputs = [*out.hidden_states[:-1], unnormed]
        states = out.last_hidden_state
        return torch.cat([*(inputs[layer].to(states.dtype) for layer in self.layers), states], -1)
