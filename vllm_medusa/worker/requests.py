"""Options that come with a request: ``SamplingParams(extra_args={"medusa": {...}})``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_medusa.config import AcceptanceConfig, MedusaConfigError
from vllm_medusa.tree.forms import shown
from vllm_medusa.worker.options import is_for_v2, is_medusa
from vllm_medusa.worker.overrides import override

CANDIDATES = 4  # for each draft of a request whose grammar will choose
GREEDY_BELOW = 1e-5  # vLLM's own bound below which a temperature means greedy


def install_request_check() -> None:
    """Validate Medusa's request options in the front end, where a bad request fails alone."""
    from vllm.sampling_params import SamplingParams

    override(SamplingParams, "_validate_spec_decode", _validate)


def _validate(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        original(self, speculative_config)
        if not is_medusa(speculative_config):
            return
        from vllm.exceptions import VLLMValidationError

        default = AcceptanceConfig(**speculative_config.medusa_acceptance)
        try:
            acceptance = AcceptanceConfig.from_extra_args(self.extra_args, default)
        except MedusaConfigError as error:
            raise VLLMValidationError(
                str(error), parameter="extra_args", value=shown(self.extra_args)
            ) from error
        if self.thinking_token_budget is not None:
            if is_for_v2(speculative_config):
                reason = "counts drafts as a chain in vLLM's V2 model runner. Leave it out, or set"
                reason += " VLLM_USE_V2_MODEL_RUNNER=0."
            elif acceptance.mode == "typical":
                reason = "needs lossless acceptance. Leave one of them out."
            else:
                return
            raise VLLMValidationError(
                f"thinking_token_budget is {self.thinking_token_budget}, which {reason}",
                parameter="thinking_token_budget",
                value=self.thinking_token_budget,
            )

    return _validate_spec_decode


def follows_grammar(params: Any) -> bool:
    """Whether a request's output is structured, so that the scheduler chooses its drafts.

    ``params`` are its ``SamplingParams``, or None. vLLM walks a grammar along the drafts as if they
    were a chain, so of its masks only the first, the root's, is right for a tree;
    `GrammarScheduler` makes the others.
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
