"""A transformers causal LM as the heads' target: hidden states and logits as computed by vLLM.

Serving runs the backbone, including the final norm, then the LM head with bias, soft cap and
scale (vLLM, ``model_executor/layers/logits_processor.py``). The heads' input is between the two, so
a model is a valid target only if its forward pass is these two steps. This is not assumed for an
architecture but tested when the model is loaded: ``lm_head(hidden_states)`` must equal
the logits of a whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative


class TargetError(ValueError):
    """A model that can't be the heads' target; the message has the reason."""


class Target:
    """A frozen causal LM with a plain LM head.

    ``model`` is transformers' own object; adapters may be added to its layers in place. Nothing in
    it requires gradients after construction, but ``no_grad`` is not used: gradients reach
    parameters that are made trainable.

    Attributes:
        model: the whole model, in evaluation mode.
        state_names: the one kind of state that `hidden_states` returns.
        hidden_size: H, the width of the LM head's inputs.
        vocab_size: V, the number of the LM head's rows.
        logit_scale: the logits' factor, 1 for most models.
        soft_cap: the logits' bound c in ``c * tanh(logits / c)``, or None.
        embedding_weight: [>= V, H], as stored.
        lm_head_weight: [V, H], without scale; the embedding itself if they are tied.
        lm_head_bias: [V], or None.

    """

    state_names = ("last",)

    def __init__(self, model: PreTrainedModel) -> None:
        """Freeze ``model`` and check that it consists of a backbone and an LM head.

        Raises TargetError: it has no LM head, or its logits are not the LM head's output with a
        bias, a soft cap and a scale.
        """
        self.model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        name = type(model).__name__
        if head is None or getattr(head, "weight", None) is None:
            raise TargetError(f"{name} has no LM head; heads need a causal language model.")
        if getattr(model.config, "is_encoder_decoder", False):
            raise TargetError(f"{name} is an encoder-decoder; heads need a decoder-only model.")
        self.lm_head_weight: Tensor = head.weight
        self.lm_head_bias: Tensor | None = getattr(head, "bias", None)
        self.embedding_weight: Tensor = model.get_input_embeddings().weight
        self.backbone: Any = model.base_model
        if self.backbone is model:
            raise TargetError(f"{name} has no backbone separate from its LM head.")
        self.vocab_size = int(getattr(head, "out_features", 0) or head.weight.shape[0])
        self.hidden_size = int(getattr(head, "in_features", 0) or head.weight.shape[-1])
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None) or None
        self.logit_scale = 1.0
        self._find_scale(config)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,  # compute dtype: float32, bfloat16 or float16
        device: torch.device | str = "cpu",
        quantization: str | None = None,  # "4bit" (NF4) or "8bit" weights by bitsandbytes
    ) -> Target:
        """Load a model from a folder or hub name, frozen.

        Raises TargetError: it can't be loaded, is not a valid target, or can't be quantized here.
        """
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        options: dict[str, Any] = {"dtype": dtype}
        try:
            if quantization is not None:
                options["quantization_config"] = BitsAndBytesConfig(
                    load_in_4bit=quantization == "4bit",
                    load_in_8bit=quantization == "8bit",
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_compute_dtype=dtype,
                )
                options["device_map"] = {"": torch.device(device)}
            model = AutoModelForCausalLM.from_pretrained(str(source), **options)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise TargetError(f"{source} can't be loaded as a causal LM: {error}") from error
        if quantization is None:
            model = model.to(device)
        return cls(model)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return self.model.get_input_embeddings().weight.device

    @property
    def end_tokens(self) -> set[int]:
        """End-of-text token ids."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if ends is None:
            ends = self.model.config.get_text_config().eos_token_id
        return set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Inputs of the LM head, after the final norm.

        For ids int64 [B, L], shorter texts padded on the right, and a mask [B, L], 1 for
        text (None: everywhere): [B, L, H] in the model's compute dtype.
        """
        return self.run(ids, attention_mask).last_hidden_state

    def run(self, ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """The backbone's own output, see `hidden_states`."""
        return self.backbone(
            input_ids=ids, attention_mask=attention_mask, use_cache=False, **options
        )

    @property
    def lm_head(self) -> Callable[[Tensor], Tensor]:
        """`lm_head_of` all tokens, in the LM head's own dtype."""
        return self.lm_head_of()

    def lm_head_of(
        self, token_map: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The LM head over all tokens, or those of ``token_map``, whose rows are gathered once.

        It gives logits with the target's bias, soft cap and scale, as in serving: [..., H] of any
        float dtype -> [..., V or V_draft] in ``dtype`` (None: the LM head's own), or autocast's.
        """
        rows = slice(None) if token_map is None else token_map
        weight = self.lm_head_weight.detach()[rows]
        weight = weight if dtype is None else weight.to(dtype)
        bias = self.lm_head_bias
        bias = None if bias is None else bias.detach()[rows].to(weight.dtype)

        def lm_head(x: Tensor) -> Tensor:
            logits = functional.linear(x.to(weight.dtype), weight, bias)
            if self.soft_cap is not None:
                logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
            return logits if self.logit_scale == 1.0 else logits * self.logit_scale

        return lm_head

    @torch.no_grad()
    def _find_scale(self, config: Any) -> None:
        """Choose the scale, among the candidates from the config, that gives the right logits."""
        count = min(_PROBE_TOKENS, self.vocab_size)
        ids = torch.linspace(0, self.vocab_size - 1, count).long()[None].to(self.device)
        whole = self.model(input_ids=ids, use_cache=False).logits.float()  # [1, n, V]
        states = self.hidden_states(ids)
        name = type(self.model).__name__
        if states.shape[-1] != self.hidden_size:
            raise TargetError(
                f"{name}: the backbone outputs {states.shape[-1]} channels, but the LM head "
                f"takes {self.hidden_size}. Such a model can't be a target."
            )
        bound = _TOLERANCE.get(states.dtype, 2e-2) * max(1e-6, float(whole.abs().max()))
        errors = {}
        for self.logit_scale in _possible_scales(config):
            errors[self.logit_scale] = float((self.lm_head(states).float() - whole).abs().max())
            if errors[self.logit_scale] <= bound:
                return
        raise TargetError(
            f"{name}: the LM head applied to the final hidden states differs from the logits "
            f"by {min(errors.values()):.3g} (limit {bound:.3g}), so the model applies another "
            "operation in between. Such a model can't be a target."
        )


def stored_dtype(config: Any) -> torch.dtype | None:
    """The dtype of a target's weights, if its transformers config states it."""
    return DTYPES.get(str(getattr(config, "dtype", None)).removeprefix("torch."))


def target_dtype(choice: str, own: torch.dtype | None, device: torch.device) -> torch.dtype:
    """What the target computes in: "auto" is its ``own`` on a GPU and float32 on a CPU."""
    if choice != "auto":
        return DTYPES[choice]
    return torch.float32 if device.type == "cpu" else own or torch.bfloat16


def _possible_scales(config: Any) -> list[float]:
    """Possible factors of the logits: those in the config, if any, then 1."""
    factors = [
        float(value)
        for name in ("logit_scale", "lm_head_multiplier", "logits_scaling")
        if isinstance(value := getattr(config, name, None), int | float) and value > 0
    ]
    if inverse := getattr(config, "logits_scaling", None):  # Granite divides
        factors.insert(0, 1.0 / float(inverse))
    return [*factors, 1.0]
