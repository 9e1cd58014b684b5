"""User options, validated once from plain dicts; the only module that uses os.environ.

The options arrive in vLLM's ``speculative_config`` (`MedusaConfig`, `DrafterConfig`), a request may
override the acceptance rule and limit its drafts in ``SamplingParams.extra_args["medusa"]``
(`RequestConfig`), and `resolve_tree` returns a validated `TokenTree` from any form of a tree.
Invalid options raise `MedusaConfigError` with the value, the allowed values and the remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.forms import FORMS, TreeValue, did_you_mean, read_tree, shown
from vllm_medusa.tree.presets import DEFAULT_TREE
from vllm_medusa.tree.topology import MAX_NODES, TokenTree, TreeError

METHOD = "medusa"


class MedusaConfigError(ValueError):
    """An invalid option; the message has the allowed values and the remedy."""


class _Options(BaseModel):
    """A frozen model whose constructor raises `MedusaConfigError` with a readable message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    label: ClassVar[str]
    names: ClassVar[dict[str, str]] = {}  # user-facing name of a field, if it differs

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise MedusaConfigError(_explained(type(self), error)) from None


def _fraction(default: float) -> Any:
    text = f"a number above 0 and at most 1 (default {default}); lower accepts more"
    return Field(default=default, gt=0, le=1, description=text)


class AcceptanceConfig(_Options):
    """When a drafted token is accepted.

    ``lossless`` keeps the target's distribution unchanged. ``typical`` accepts a token whose target
    probability exceeds ``min(epsilon, delta * exp(-entropy))``: more tokens per step, but the
    output distribution changes. With ``greedy_root`` the final token of a typical step is the
    argmax instead of a sample.
    """

    label: ClassVar[str] = "Medusa acceptance"

    mode: Literal["lossless", "typical"] = Field(
        default="lossless", description='"lossless" or "typical"'
    )
    epsilon: float = _fraction(0.09)
    delta: float = _fraction(0.3)
    greedy_root: bool = Field(
        default=False, description="true or false: the last token of a typical step is the argmax"
    )

    @model_validator(mode="after")
    def _no_unused_options(self) -> AcceptanceConfig:
        for name in ("epsilon", "delta", "greedy_root"):
            value = getattr(self, name)
            if self.mode == "lossless" and value != type(self).model_fields[name].default:
                raise MedusaConfigError(
                    f"{self.label} {name} is {value!r}, which has no effect in lossless mode; "
                    f'choose typical acceptance too, or remove "{name}".'
                )
        return self

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | AcceptanceConfig | None) -> AcceptanceConfig:
        """Parse ``"typical"`` or ``{"mode": "typical", "epsilon": 0.1}``; None gives the default.

        Raises:
            MedusaConfigError: Wrong type, unknown key, or value out of range.

        """
        if isinstance(value, AcceptanceConfig):
            return value
        if isinstance(value, str):
            value = {"mode": value}
        if not isinstance(value or {}, Mapping):
            raise MedusaConfigError(
                f'{cls.label} is {shown(value)}; use "lossless", "typical" or a dict such as '
                '{"mode": "typical", "epsilon": 0.1}.'
            )
        return cls(**{str(key): option for key, option in (value or {}).items()})


class RequestConfig(AcceptanceConfig):
    """A request's own options, ``SamplingParams(extra_args={"medusa": {...}})``.

    ``max_draft_tokens`` limits the draft nodes per step; with 0, the request is decoded as in plain
    vLLM.
    """

    label: ClassVar[str] = "Medusa request option"
    names: ClassVar[dict[str, str]] = {"mode": "acceptance"}

    max_draft_tokens: int | None = Field(
        default=None, ge=0, description="an integer of 0 or more; omit it for no limit"
    )

    @classmethod
    def from_extra_args(
        cls, extra: Mapping[str, Any] | None, default: AcceptanceConfig
    ) -> RequestConfig:
        """Apply a request's ``extra_args={"medusa": {"acceptance": "typical", ...}}``.

        Missing options are taken from ``default``; if the request changes the mode, they are the
        fields' own defaults instead. A string (the mode, or the JSON of the dict) is accepted too,
        because servers do not allow nested extra arguments.

        Raises:
            MedusaConfigError: Wrong type, unknown key, or value out of range.

        """
        if not isinstance(extra or {}, Mapping):
            raise MedusaConfigError(
                f"SamplingParams.extra_args is {shown(extra)}; use a dict, or omit it."
            )
        for key in extra or {}:
            if key != "medusa" and str(key).lower() in ("medusa", "max_draft_tokens", "acceptance"):
                raise MedusaConfigError(
                    f"SamplingParams.extra_args has {key!r}; the options are in "
                    '"medusa": {"medusa": {"max_draft_tokens": 4}}.'
                )
        options = (extra or {}).get("medusa")
        if isinstance(options, str):
            options = _read_text(options)
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            raise MedusaConfigError(
                f'SamplingParams.extra_args["medusa"] is {shown(options)}; use a dict such as '
                '{"max_draft_tokens": 4}, or its JSON as a string.'
            )
        given = {str(key): value for key, value in options.items()}
        if "mode" in given:
            raise MedusaConfigError(f"{cls.label} 'mode' is unknown; its name is \"acceptance\".")
        given["mode"] = given.pop("acceptance", default.mode)
        return cls(**(given if given["mode"] != default.mode else default.model_dump() | given))


WIDTH, DEPTH, DRAFTS = 10, 6, 59  # EAGLE-2's: 60 nodes, root included
CHAIN = 5  # default number of draft tokens of a chain
OWN_TREE = "heads"  # selects the tree in the heads' config
_BOUNDS = {"width": 64, "depth": 32}  # max values for a dynamic tree of EAGLE or MTP
_Nodes = Annotated[int, Field(ge=1, lt=MAX_NODES)]
_MaxRows = dict[Annotated[str, Field(pattern="^max_rows$")], Annotated[int, Field(ge=2)]]


class _DraftOptions(_Options):
    """Common ``speculative_config`` options of all tree drafters."""

    model: str | None = Field(
        default=None, min_length=1, description="the folder or hub name of the heads or drafter"
    )
    revision: str | None = Field(
        default=None, min_length=1, description="a branch, tag or commit of the repository"
    )
    acceptance: AcceptanceConfig = Field(
        default_factory=AcceptanceConfig,
        description='"lossless", "typical" or a dict such as {"mode": "typical", "epsilon": 0.1}',
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=MAX_NODES,
        description=f"an integer from 1 to {MAX_NODES - 1}: max draft nodes per request; "
        "omit it for the default",
    )
    budget: Literal["auto"] | _Nodes | Annotated[_MaxRows, Field(min_length=1)] | None = Field(
        default=None,
        description=f'"auto"; an integer from 1 to {MAX_NODES - 1}: draft nodes per request; or '
        '{"max_rows": N}: max running requests and drafts per step, 2 or more; omitted: "auto", '
        "or all nodes of a static tree",
    )
    lookup: bool = Field(
        default=False,
        description="true or false: also draft tokens copied from the request's own text",
    )
    shared_noise: bool = Field(
        default=True,
        description="true or false: for sampling requests, choose drafts with the random numbers "
        "that the sampler will use; more are accepted, and no token changes",
    )

    @field_validator("model", mode="before")
    @classmethod
    def _path_to_text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("acceptance", mode="before")
    @classmethod
    def _any_acceptance(cls, value: Any) -> AcceptanceConfig:
        return AcceptanceConfig.parse(value)

    @classmethod
    def from_speculative_config(cls, config: Mapping[str, Any]) -> Self:
        """Parse the dict that the user passed to vLLM; the caller handles its ``method``.

        Raises:
            MedusaConfigError: Unknown option, or value out of range.

        """
        return cls(**{name: value for name, value in config.items() if name != "method"})


class MedusaConfig(_DraftOptions):
    """The ``speculative_config`` of ``method="medusa"``; the default budget is "auto"."""

    label: ClassVar[str] = "The Medusa option"

    tree: str | list[Any] | dict[str, Any] | None = Field(
        default=None,
        description=f'{FORMS}, in plain JSON types, or "{OWN_TREE}" for the tree in the heads\' '
        "config; omit it for dynamic trees",
    )

    @field_validator("tree", mode="before")
    @classmethod
    def _plain_tree(cls, value: object) -> object:
        if value == "dynamic" or (
            isinstance(value, Mapping) and value and value.keys() <= _BOUNDS.keys()
        ):
            raise MedusaConfigError(
                f"{cls.label} tree is {shown(value)}, which is only for EAGLE and MTP. With "
                'heads, trees are dynamic if "tree" is not set: omit it.'
            )
        try:
            return str(value) if isinstance(value, Path) else json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise MedusaConfigError(
                f"{cls.label} tree is {shown(value)}; use {FORMS}, in plain JSON types."
            ) from None

    @model_validator(mode="after")
    def _no_contradiction(self) -> MedusaConfig:
        for name in ("budget", "lookup"):
            value = getattr(self, name)
            if value and self.tree is not None:
                raise MedusaConfigError(
                    f"{self.label} {name} is {shown(value)}, which needs dynamic trees, but a "
                    'static "tree" is set too; omit one of them.'
                )
        if self.lookup and self.revision is not None and self.model is None:
            raise MedusaConfigError(
                f'{self.label} revision is {self.revision!r}, but lookup without "model" has no '
                'heads; set "model", or omit "revision".'
            )
        return self


class DrafterConfig(_DraftOptions):
    """The ``speculative_config`` of a drafter with its own KV cache and a ``tree``.

    The default budget is "auto"; for a chain it is the length of the chain.
    """

    label: ClassVar[str] = "The option"

    tree: Literal["dynamic", "chain"] | dict[str, int] = Field(
        description='"dynamic", "chain", or an object such as {"width": 10, "depth": 6}: a dynamic '
        "tree with at most 10 children per node and 6 levels (width up to 64, depth up to 32)",
    )

    @model_validator(mode="after")
    def _valid_tree(self) -> Self:
        tree = self.tree
        if self.lookup and tree == "chain":
            raise MedusaConfigError(
                f'{self.label} lookup is True, which needs dynamic trees, but tree is "chain". '
                'Use {"width": 1, "depth": 5}, a chain that supports lookup, or omit '
                '"lookup".'
            )
        if isinstance(tree, dict) and not (
            tree and all(1 <= n <= _BOUNDS.get(name, 0) for name, n in tree.items())
        ):
            use = type(self).model_fields["tree"].description
            raise MedusaConfigError(f"{self.label} tree is {shown(tree)}; use {use}.")
        return self

    @property
    def dynamic_tree(self) -> DynamicTree:
        """The dynamic tree that the options describe."""
        maximum = self.num_speculative_tokens
        if self.tree == "chain":
            length = maximum or CHAIN
            return DynamicTree(Beam(1, 1, length), 1 + length)
        given = self.tree if isinstance(self.tree, dict) else {}
        if isinstance(self.budget, int):
            maximum = min(maximum or MAX_NODES - 1, self.budget)
        width = given.get("width", WIDTH)
        beam = Beam(width, width, given.get("depth", DEPTH))
        num_nodes = 1 + (maximum or DRAFTS)  # lookup may add nodes to the drafter's
        return DynamicTree(beam, num_nodes if self.lookup else min(num_nodes, beam.num_nodes))


class EagleConfig(DrafterConfig):
    """The options of an EAGLE drafter."""

    model: str = Field(min_length=1, description="the folder or hub name of the drafter")


_OF_TARGET = "no value: the MTP module is loaded from the target's checkpoint"


class MtpConfig(DrafterConfig):
    """The options of a multi-token-prediction (MTP) module in the target's own checkpoint."""

    model: None = Field(default=None, description=_OF_TARGET)
    revision: None = Field(default=None, description=_OF_TARGET)


# vLLM's names of drafters with a KV cache; with a "tree" they are ours, else vLLM's own
DRAFTER_METHODS: dict[str, type[DrafterConfig]] = {
    "eagle": EagleConfig,
    "eagle3": EagleConfig,
    "mtp": MtpConfig,
}


def resolve_tree(
    value: TreeValue | None,
    heads_default: TreeValue | None = None,
    num_heads: int | None = None,
    vocab_size: int | None = None,
    max_draft_tokens: int | None = None,
) -> TokenTree:
    """Find, cap and check the static tree to use.

    Args:
        value: The user's option, any of `tree.forms.FORMS`; None or `OWN_TREE`: the heads' tree.
        heads_default: The tree in the heads' own config; None if there is none. Without either,
            `DEFAULT_TREE` is used, truncated to the heads' depth and width.
        num_heads: Max depth of a tree; None skips the check.
        vocab_size: Draft vocabulary size of the heads; None skips the check.
        max_draft_tokens: Max draft nodes to keep, at least 1.

    Raises:
        MedusaConfigError: The tree is malformed, or its kept part is deeper than the number of
            heads or has a rank beyond the vocabulary.

    """
    value = None if value == OWN_TREE else value
    described = heads_default if value is None else value
    if described is None:
        name = "The default tree"
    else:
        name = "The tree" if value is not None else "The tree in the heads' own config"
    if isinstance(described, str | Path):
        name += f" ({str(described)!r})"
    try:
        if described is None:
            tree = DEFAULT_TREE.cut(max_depth=num_heads, num_ranks=vocab_size)
        else:
            tree = read_tree(described)
        if max_draft_tokens is not None:
            tree = tree.prefix(max_draft_tokens + 1)
        _check_fits(tree, num_heads, vocab_size)
    except TreeError as error:
        remedy = ' Set the option "tree" to use another tree.'
        if value is not None:
            remedy = f' "{OWN_TREE}" is the tree in the heads\' config; the default is dynamic.'
        raise MedusaConfigError(f"{name} can't be used. {error}{remedy}") from None
    return tree


def _read_text(text: str) -> object:
    """Parse a mode's name or the JSON of a dict; invalid JSON is returned unchanged."""
    if text.isidentifier():
        return {"acceptance": text}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON; too many digits or levels
        return text


def _check_fits(tree: TokenTree, num_heads: int | None, vocab_size: int | None) -> None:
    """Raise `TreeError` if a node is deeper than the heads or a rank exceeds the vocabulary."""
    if not tree.paths:
        raise TreeError(
            f"{num_heads} heads over {vocab_size} tokens can't draft; both must be > 0."
        )
    deepest = max(tree.paths, key=lambda path: len(path))
    if num_heads is not None and len(deepest) > num_heads:
        raise TreeError(
            f"Its path {list(deepest)} has depth {len(deepest)}, but there are {num_heads} heads "
            f"and each fills one level. Use a tree of depth {num_heads} or less, such as "
            f'{{"dense": {[4, 3, 2][:num_heads]}}} or {{"chain": {num_heads}}}, or use heads with '
            f"{len(deepest)} levels."
        )
    widest = max(tree.paths, key=lambda path: max(path))
    if vocab_size is not None and max(widest) >= vocab_size:
        raise TreeError(
            f"Its path {list(widest)} uses rank {max(widest)}, but the heads choose from "
            f"{vocab_size} tokens, so ranks go up to {vocab_size - 1}. Use a narrower tree."
        )


def use_hub_cache() -> None:
    """Make this process and its children use only the hub's local cache."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def run_engines_in_this_process() -> None:
    """Make vLLM run its engine core in the calling process, unless the user set this.

    A separate core process would outlive a killed caller and keep its memory.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def reuse_compiled_models() -> None:
    """Make vLLM on CPUs reuse compiled models, unless the user set this.

    vLLM 0.32 (0.33 has no CPU build) saves models that were compiled ahead of time, but fails to
    load them on CPUs (`compilation/decorators.py`, "Compiling model again"), so it compiles them at
    every start. Without that, torch's own cache is used.
    """
    import torch

    if torch.accelerator.current_accelerator() is None:  # as built: starts no GPU before a fork
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


@contextmanager
def loggers_left_alone() -> Iterator[None]:
    """Keep vLLM from configuring its loggers again for each engine's config."""
    from unittest.mock import patch  # slow to import

    with patch.dict(os.environ, {"VLLM_CONFIGURE_LOGGING": "0"}):
        os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)
        yield


def refuse_misspelled(method: object) -> None:
    """Refuse a method that was probably meant to be "medusa"; others are vLLM's."""
    if not isinstance(method, str) or method == METHOD:
        return
    if hint := did_you_mean(method.strip().lower(), [METHOD]):
        raise MedusaConfigError(
            f"speculative_config has the unknown method {method!r}{hint}. Trees need "
            '"method": "medusa", or "eagle", "eagle3" or "mtp" and a "tree".'
        )


def _explained(kind: type[_Options], error: ValidationError) -> str:
    """One sentence per pydantic error."""
    sentences: list[str] = []
    named: set[str] = set()
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if len(problem["loc"]) > 1 and name in named:  # an alternative form of the value
            continue
        named.add(name)
        if problem["type"] == "value_error":
            sentence = str(problem["ctx"]["error"])
        elif problem["type"] == "extra_forbidden":
            allowed = tuple(kind.names.get(field, field) for field in kind.model_fields)
            hint = did_you_mean(name, allowed)
            if name in AcceptanceConfig.model_fields and "acceptance" in allowed:
                hint = '; it belongs in {"acceptance": {"mode": "typical", "epsilon": 0.1}}'
            sentence = f"{kind.label} {name!r} is unknown{hint}; allowed: {', '.join(allowed)}."
        else:
            field = kind.model_fields[name]
            given = "missing" if problem["type"] == "missing" else shown(problem["input"])
            shown_name = kind.names.get(name, name)
            sentence = f"{kind.label} {shown_name} is {given}; use {field.description}."
        if sentence not in sentences:
            sentences.append(sentence)
    return " ".join(sentences)
