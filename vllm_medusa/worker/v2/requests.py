"""What a step must know of its requests, by their slot in vLLM's state, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.penalties import use_penalty

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.worker.requests import GREEDY_BELOW, acceptance_of, follows_grammar


@dataclass(frozen=True)
class TypicalRule:
    """The typical rule of B requests; only those of ``mask`` go by it."""

    mask: Tensor  # bool [B]
    epsilon: Tensor  # float32 [B]
    delta: Tensor  # float32 [B]
    greedy_root: Tensor  # bool [B]
    any_greedy_root: bool


class RequestOptions:
    """Kept on the host, where a step's questions to it are answered without the device."""

    def __init__(
        self,
        max_num_reqs: int,
        default: AcceptanceConfig,
        max_model_len: int,
        device: torch.device,
    ):
        self.default = default
        self.device = device
        self._max_model_len = max_model_len
        self._most_tokens = np.full(max_num_reqs, max_model_len, dtype=np.int64)
        self._by_path = np.zeros(max_num_reqs, dtype=bool)
        self._follows = np.zeros(max_num_reqs, dtype=bool)
        self._sampled = np.zeros(max_num_reqs, dtype=bool)
        self._typical = np.zeros(max_num_reqs, dtype=bool)
        self._greedy_root = np.zeros(max_num_reqs, dtype=bool)
        self._epsilon = np.ones(max_num_reqs, dtype=np.float32)
        self._delta = np.ones(max_num_reqs, dtype=np.float32)

    def add(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        """Take a request in; its slot may have been another's."""
        rule = acceptance_of(params, self.default)
        most = self._max_model_len
        if params.max_tokens is not None:
            most = min(most, prompt_len + params.max_tokens)
        self._most_tokens[slot] = most
        typical = rule.mode == "typical" and params.temperature >= GREEDY_BELOW
        self._by_path[slot] = use_penalty(params) or bool(params.bad_words_token_ids)
        self._follows[slot] = follows_grammar(params)
        self._sampled[slot] = params.temperature >= GREEDY_BELOW
        self._typical[slot] = typical
        self._greedy_root[slot] = typical and rule.greedy_root
        self._epsilon[slot], self._delta[slot] = rule.epsilon, rule.delta

    def by_path(self, slots: np.ndarray) -> np.ndarray:
        """Whether distributions depend on the tokens before them, not on the logits alone."""
        return self._by_path[slots]

    def follows_grammar(self, slot: int) -> bool:
        """Whether the scheduler chooses the request's drafts, see `requests.follows_grammar`."""
        return bool(self._follows[slot])

    def may_copy(self, slots: np.ndarray) -> Tensor:
        """Of B requests, bool [2, B]: those that follow no grammar; those that sample."""
        found: Tensor = self._copy(np.stack([~self._follows[slots], self._sampled[slots]]))
        return found

    def useful_depth(self, slots: np.ndarray, num_tokens: Tensor) -> Tensor:
        """How deep a node can be and still give a token that the request keeps, int64 [B].

        ``num_tokens`` (integer [B]) are its tokens so far; the last of a step needs no node.
        """
        depth = self._copy(self._most_tokens[slots]) - num_tokens - 1
        return depth.clamp_min(0)

    def typical(self, slots: np.ndarray) -> TypicalRule | None:
        """The requests that accept by the typical rule; None if there are none."""
        mask = self._mask(self._typical[slots])
        if mask is None:
            return None
        return TypicalRule(
            mask,
            self._copy(self._epsilon[slots]),
            self._copy(self._delta[slots]),
            self._copy(self._greedy_root[slots]),
            bool(self._greedy_root[slots].any()),
        )

    def _mask(self, values: np.ndarray) -> Tensor | None:
        return self._copy(values) if values.any() else None

    def _copy(self, values: np.ndarray) -> Any:
        return async_tensor_h2d(values, device=self.device)
