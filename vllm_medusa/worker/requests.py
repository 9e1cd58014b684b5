"""Options that come with a request: ``SamplingParams(extra_args={"medusa": {...}})``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.config import AcceptanceConfig, MedusaConfigError
from vllm_medusa.tree.forms import shown
from vllm_medusa.worker.overrides import override

GREEDY_BELOW = 1e-5  # vLLM's own bound below which a temperature means greedy


def install_request_check() -> None:
    """Validate Medusa's request options in the front end, where a bad request fails alone."""
    from vllm.sampling_params import SamplingParams

    override(SamplingParams, "_validate_spec_decode", _validate)


def _validate(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        original(self, speculative_config)
        from vllm_medusa.worker.options import is_medusa

        if not is_medusa(speculative_config):
            return
        from vllm.exceptions import VLLMValidationError

        if self.thinking_token_budget is not None:
            raise VLLMValidationError(
                "thinking_token_budget counts drafts as a chain and is not supported with Medusa "
                "trees; leave it out.",
                parameter="thinking_token_budget",
                value=self.thinking_token_budget,
            )
        default = AcceptanceConfig(**speculative_config.medusa_acceptance)
        try:
            AcceptanceConfig.from_extra_args(self.extra_args, default)
        except MedusaConfigError as error:
            raise VLLMValidationError(
                str(error), parameter="extra_args", value=shown(self.extra_args)
            ) from error

    return _validate_spec_decode


@dataclass(frozen=True)
class TypicalRequests:
    """The requests of a batch that accept by the typical rule, among B."""

    mask: list[bool]  # [B]
    epsilon: Tensor  # float32 [B]
    delta: Tensor  # float32 [B]
    greedy_root: list[bool]  # [B]

    @classmethod
    def of(
        cls, params: list[Any], default: AcceptanceConfig, device: torch.device
    ) -> TypicalRequests | None:
        """Collect them from the requests' sampling parameters; None if every one is lossless.

        At temperature 0 typical acceptance is greedy exactly, which the lossless walk is too.
        """
        chosen = [acceptance_of(param, default) for param in params]
        mask = [
            choice.mode == "typical" and param.temperature >= GREEDY_BELOW
            for choice, param in zip(chosen, params, strict=True)
        ]
        if not any(mask):
            return None
        return cls(
            mask=mask,
            epsilon=torch.tensor([choice.epsilon for choice in chosen], device=device),
            delta=torch.tensor([choice.delta for choice in chosen], device=device),
            greedy_root=[
                choice.greedy_root and typical for choice, typical in zip(chosen, mask, strict=True)
            ],
        )


def follows_grammar(params: Any) -> bool:
    """Whether a request's output is structured, and so gets no drafts.

    ``params`` are its ``SamplingParams``, or None. vLLM walks a grammar along the drafts as if they
    were a chain, so of its masks only the first, the root's, is right for a tree.
    """
    return params is not None and params.structured_outputs is not None


def acceptance_of(params: Any, default: AcceptanceConfig) -> AcceptanceConfig:
    """The rule of a request with these sampling parameters."""
    if not params.extra_args:
        return default
    try:
        return AcceptanceConfig.from_extra_args(params.extra_args, default)
    except ValueError:  # the front end refuses these; whatever slips by costs no engine
        return AcceptanceConfig()
