"""Options per request, ``SamplingParams(extra_args={"medusa": {...}})``, and their table by slot.

Both runners keep `RequestOptions` on the host, to read them without a sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_medusa.config import AcceptanceConfig, MedusaConfigError, RequestConfig
from vllm_medusa.integration.overrides import override
from vllm_medusa.integration.startup.options import has_trees, is_for_v2
from vllm_medusa.lookup.search import Array
from vllm_medusa.tree.forms import shown

CANDIDATES = 4  # per draft of a request with a grammar
GREEDY_BELOW = 1e-5  # vLLM's limit below which a temperature means greedy


def install() -> None:
    """Validate Medusa's request options in the front end, so that only the bad request fails."""
    override(SamplingParams, "_validate_spec_decode", _validate)


def _validate(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    original(self, speculative_config)
    if not has_trees(speculative_config):
        return
    default = AcceptanceConfig(**speculative_config.medusa_acceptance)
    try:
        acceptance = RequestConfig.from_extra_args(self.extra_args, default)
    except MedusaConfigError as error:
        given = shown(self.extra_args)
        raise VLLMValidationError(str(error), parameter="extra_args", value=given) from error
    budget = self.thinking_token_budget
    if budget is None:
        return
    if is_for_v2(speculative_config):
        reason = "counts drafts as a chain in vLLM's V2 model runner. Omit it, or set"
        reason += " VLLM_USE_V2_MODEL_RUNNER=0."
    elif acceptance.mode == "typical":
        reason = "needs lossless acceptance. Omit one of them."
    else:
        return
    name = "thinking_token_budget"
    raise VLLMValidationError(f"{name} is {budget}, which {reason}", parameter=name, value=budget)


def request_config(params: SamplingParams | None, default: AcceptanceConfig) -> RequestConfig:
    """A request's own options, in the engine."""
    try:
        return RequestConfig.from_extra_args(params and params.extra_args, default)
    except MedusaConfigError:  # the front end refuses these; the engine must not crash
        return RequestConfig()


def follows_grammar(params: Any) -> bool:
    """Whether a request's output is structured, so that the scheduler chooses its drafts.

    ``params`` are its ``SamplingParams``, or None. vLLM advances a grammar along drafts as along a
    chain, so only the first of its masks, the root's, is right for a tree;
    `integration.scheduling.grammar_drafts` computes the others.
    """
    return params is not None and params.structured_outputs is not None


@dataclass(frozen=True)
class TypicalRule:
    """The typical rule of B requests; applies to those in ``mask``."""

    mask: Tensor  # bool [B]
    epsilon: Tensor  # float32 [B]
    delta: Tensor  # float32 [B]
    greedy_root: Tensor  # bool [B]
    any_greedy_root: bool


class RequestOptions:
    """The options of running requests, by slot."""

    def __init__(
        self, num_slots: int, default: AcceptanceConfig, max_model_len: int, device: torch.device
    ) -> None:
        self.default, self.device = default, device
        self._max_model_len = max_model_len
        self._max_tokens = np.full(num_slots, max_model_len, dtype=np.int64)  # of the whole text
        self._by_path, self._follows, self._typical, self._greedy_root = np.zeros(
            (4, num_slots), dtype=bool
        )
        self._temperature = np.zeros(num_slots, dtype=np.float32)  # 0: greedy
        self._epsilon, self._delta = np.ones((2, num_slots), dtype=np.float32)

    def add(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        """Add a request to a slot, which may have been used before."""
        rule = request_config(params, self.default)
        max_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, prompt_len + params.max_tokens)
        if rule.max_draft_tokens == 0:
            max_tokens = 0  # so that no node is useful, and nothing is drafted
        self._max_tokens[slot] = max_tokens
        sampled = params.temperature >= GREEDY_BELOW
        # At temperature 0 typical acceptance is exactly greedy, like the lossless rule.
        typical = rule.mode == "typical" and sampled
        self._by_path[slot] = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or bool(params.bad_words_token_ids)
        )
        self._follows[slot] = follows_grammar(params)
        self._temperature[slot] = params.temperature if sampled else 0.0
        self._typical[slot] = typical
        self._greedy_root[slot] = typical and rule.greedy_root
        self._epsilon[slot], self._delta[slot] = rule.epsilon, rule.delta

    def by_path(self, slots: np.ndarray) -> np.ndarray:
        """Whether distributions depend on earlier tokens, not only on the logits."""
        return self._by_path[slots]

    def follows_grammar(self, slots: np.ndarray) -> np.ndarray:
        """Whether the scheduler chooses the requests' drafts: bool [B]."""
        return self._follows[slots]

    def may_copy(self, slots: np.ndarray) -> np.ndarray:
        """Bool [2, B]: requests without a grammar, and requests that sample."""
        return np.stack([~self._follows[slots], self._temperature[slots] > 0])

    def draw_temperature(self, slots: np.ndarray) -> np.ndarray:
        """The temperature at which each token is drawn, float32 [B]; 0: greedy, or typical."""
        return self._temperature[slots] * ~self._typical[slots]

    def useful_depth(self, slots: np.ndarray, num_tokens: Array) -> Any:
        """Max depth of a node whose token the request can keep, int64 [B]; array or tensor.

        ``num_tokens`` (integer [B]) counts its tokens so far; a step's last token needs no node.
        """
        maximum = self._max_tokens[slots]
        if isinstance(num_tokens, Tensor):
            maximum = self._copy(maximum)
        depth = maximum - num_tokens - 1
        return depth * (depth > 0)

    def typical(self, slots: np.ndarray) -> TypicalRule | None:
        """The requests with the typical rule; None if there are none."""
        if not self._typical[slots].any():
            return None
        return TypicalRule(
            self._copy(self._typical[slots]),
            self._copy(self._epsilon[slots]),
            self._copy(self._delta[slots]),
            self._copy(self._greedy_root[slots]),
            bool(self._greedy_root[slots].any()),
        )

    def _copy(self, values: np.ndarray) -> Any:
        return async_tensor_h2d(values, device=self.device)
