"""vLLM's public `LLM` as the engine of `vllm_medusa.offline`: requests in, new tokens out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_medusa.offline.batch import Delta, RequestRefused
from vllm_medusa.offline.conversations import prompt_ids
from vllm_medusa.offline.machine import available_memory
from vllm_medusa.offline.prompts import Message, PromptError

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of all requests of a job; the seed is passed with each request."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class EngineSettings:
    """Engine settings that results depend on."""

    model: str
    speculative_config: Mapping[str, Any] | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def medusa_config(
    heads: str | None,  # folder or hub name
    tree: str | None = None,  # preset name, JSON file, or JSON text
    acceptance: str | None = None,  # "lossless", "typical", or JSON text
    num_speculative_tokens: int | None = None,  # max draft nodes
    budget: str | None = None,  # "auto", a number, or JSON text, for dynamic trees
    lookup: bool = False,  # also draft copies of the request's own text; without heads, only copies
) -> dict[str, Any]:
    """The ``speculative_config`` of an engine, from command-line options.

    ``heads`` may also be a local folder of an EAGLE drafter: its trees are dynamic unless ``tree``
    is given.
    """
    method = None
    if heads is not None and Path(heads).expanduser().is_dir():
        from vllm_medusa.heads.eagle import drafter_method  # imports torch, which is slow

        method = drafter_method(heads)
    if method is not None:
        tree = tree or "dynamic"
    options = {
        "model": heads,
        "tree": _json_or_text(tree),
        "acceptance": _json_or_text(acceptance),
        "num_speculative_tokens": num_speculative_tokens,
        "budget": int(budget) if budget and budget.isdecimal() else _json_or_text(budget),
        "lookup": lookup or None,
    }
    return {"method": method or "medusa"} | {k: v for k, v in options.items() if v is not None}


MEMORY_OPTIONS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}  # tokens do not depend on them


def without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """LLM arguments that tokens may depend on."""
    ignored = MEMORY_OPTIONS | {"log_level"}
    return {name: value for name, value in arguments.items() if name not in ignored}


def start_seconds(arguments: Mapping[str, Any]) -> int:
    """Approximate start-up time of an engine, compiled or not."""
    return 20 if arguments.get("enforce_eager") else 75


class EngineRefused(ValueError):
    """vLLM or the plugin refuses the engine settings."""


def check_engine_args(names: Iterable[str]) -> None:
    """Refuse arguments that ``LLM`` does not have, by `EngineRefused`."""
    from vllm import LLM, EngineArgs

    known = {each.name for each in fields(EngineArgs)} | signature(LLM).parameters.keys()
    for name in names:
        if name not in known:
            close = get_close_matches(name, known)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise EngineRefused(
                f"--engine-args: {name!r} is not an argument of vLLM's LLM.{meant} Correct it, or "
                "omit it."
            )


def refuse_unserved(settings: EngineSettings) -> None:
    """Check a configuration with vLLM and the plugin, without loading weights.

    Raises EngineRefused: an engine would not start with it, with the reason.
    """
    from vllm import EngineArgs

    try:
        EngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            speculative_config=settings.speculative_config,
        ).create_engine_config()
    except (ValueError, OSError) as error:
        raise EngineRefused(f"vLLM can't serve {settings.model} like this: {error}") from None


class VllmEngine:
    """A vLLM engine that reports the tokens of every step of every request."""

    def __init__(
        self,
        settings: EngineSettings,  # model and engine options
        sampling: Sampling,  # of every request
        *,
        seeded: bool = False,  # requests will have seeds
    ):
        """Start the engine.

        If requests will have seeds, prompts are never prefilled in chunks on CPUs: vLLM would
        stop with "CPU Generator does not use offset".

        Raises:
            EngineRefused: vLLM or the plugin refuses the settings, or a file is missing.

        """
        import psutil
        import torch
        from huggingface_hub.errors import LocalEntryNotFoundError
        from vllm import LLM

        self.sampling = sampling
        arguments: dict[str, Any] = {
            "model": settings.model,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "log_level": "ERROR",
        }
        if not torch.accelerator.is_available():
            if seeded:
                arguments["enable_chunked_prefill"] = False
            if not MEMORY_OPTIONS & settings.engine_args.keys():
                # vLLM's default is 92 % of the memory; it fails if that is not free
                share = 0.8 * available_memory() / psutil.virtual_memory().total
                arguments["gpu_memory_utilization"] = round(min(0.5, share), 3)
        check_engine_args(settings.engine_args)
        arguments |= settings.engine_args
        if settings.speculative_config:
            arguments["speculative_config"] = dict(settings.speculative_config)
        try:
            self.llm: LLM = LLM(**arguments)
        except (ValueError, OSError) as error:
            reason = str(error)
            offline = isinstance(error, LocalEntryNotFoundError)  # its message lacks the name
            if offline or "huggingface.co" in reason:  # transformers' message for a missing model
                reason = (
                    f"{settings.model!r} is neither a local model folder nor a hub name that "
                    f"could be looked up. {reason}"
                )
            raise EngineRefused(reason) from error

    def submit(
        self,
        key: str,
        prompt: str | list[int],
        seed: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """See `vllm_medusa.offline.batch.Engine`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        arguments = asdict(self.sampling) | {"stop": list(self.sampling.stop), **options}
        try:
            params = SamplingParams(
                **arguments,
                seed=seed,
                output_kind=RequestOutputKind.DELTA,  # one output for each engine step
            )
            self.llm.llm_engine.add_request(
                key, prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}, params
            )
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(str(error)) from error

    def step(self) -> list[Delta]:
        """See `vllm_medusa.offline.batch.Engine`."""
        deltas = []
        for output in self.llm.llm_engine.step():
            completion = output.outputs[0]
            if completion.token_ids or output.finished:
                deltas.append(
                    Delta(
                        key=output.request_id,
                        text=completion.text,
                        token_ids=list(completion.token_ids),
                        finish_reason=completion.finish_reason if output.finished else None,
                        stop_reason=completion.stop_reason,
                        prompt_token_ids=output.prompt_token_ids or (),
                    )
                )
        return deltas

    def render(self, messages: list[Message]) -> list[int]:
        """See `vllm_medusa.offline.batch.Engine`."""
        try:
            return prompt_ids(messages, self.tokenizer)
        except PromptError as error:
            raise RequestRefused(str(error)) from None

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self.llm.get_tokenizer()

    def close(self) -> None:
        """Stop the engine and its processes."""
        self.llm.llm_engine.engine_core.shutdown()


def _json_or_text(value: str | None) -> Any:
    """Parse a text that begins like a JSON list or object, else return the text."""
    if value is None or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{value!r} looks like JSON but isn't: {error.msg} at character {error.pos + 1}."
        ) from None
    except RecursionError:
        raise ValueError(f"{value[:40]!r}... is nested too deeply to be read.") from None
