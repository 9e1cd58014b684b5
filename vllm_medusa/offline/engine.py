"""vLLM's public `LLM` as the engine of `vllm_medusa.offline`: requests in, new tokens out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_medusa.offline.batch import Delta, RequestRefused
from vllm_medusa.offline.conversations import prompt_ids
from vllm_medusa.offline.defaults import CHANGE_MODEL
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


def medusa_config(heads: str | None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The ``speculative_config`` of an engine: heads and further options, ``more``.

    ``heads`` is a folder or hub name; None: the heads are part of the target, or only lookup
    drafts. The trees of an EAGLE drafter are dynamic unless ``more`` has a tree.
    """
    config: dict[str, Any] = {"method": "medusa"}
    if heads is not None:
        # imports torch, which is slow
        from vllm_medusa.heads.eagle_checkpoint import drafter_method

        config["model"] = heads
        if (method := drafter_method(heads, (more or {}).get("revision"))) is not None:
            config |= {"method": method, "tree": "dynamic"}
    return config | dict(more or {})


def check_drafter(arguments: Mapping[str, Any]) -> None:
    """Check a drafter's files, and its sizes if the target is a folder, without vLLM.

    ``arguments`` are those of vLLM's ``LLM``. Raises HeadsError: an engine would not start.
    """
    from vllm_medusa.config import DRAFTER_METHODS
    from vllm_medusa.heads.checkpoint import peek_heads
    from vllm_medusa.heads.eagle_checkpoint import require_eagle
    from vllm_medusa.heads.files import read_json
    from vllm_medusa.heads.fingerprint import config_sizes
    from vllm_medusa.heads.fit import require_fit

    config = arguments["speculative_config"] or {}
    drafter, revision = config.get("model"), config.get("revision")
    if drafter is None:
        return
    path = Path(arguments["model"]) / "config.json"
    known = path.is_file() and not CHANGE_MODEL & arguments.keys()
    sizes = config_sizes(read_json(path) if known else {})
    if config["method"] == "medusa":
        info = peek_heads(drafter, revision=revision)
        require_fit(info, sizes["hidden_size"], sizes["vocab_size"])
    elif "tree" in config and config["method"] in DRAFTER_METHODS:
        require_eagle(drafter, revision, config["method"], arguments["model"], sizes)


MEMORY_OPTIONS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}  # tokens do not depend on them


def without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """LLM arguments that tokens may depend on."""
    ignored = MEMORY_OPTIONS | {"log_level"}
    return {name: value for name, value in arguments.items() if name not in ignored}


def start_seconds(arguments: Mapping[str, Any]) -> int:
    """Approximate start-up time of an engine, compiled or not."""
    return 30 if arguments.get("enforce_eager") else 75


class EngineRefused(ValueError):
    """vLLM or the plugin refuses the engine settings."""


@contextmanager
def _refusals(model: str) -> Iterator[None]:
    """Turn vLLM's errors about settings into `EngineRefused`."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise EngineRefused(f"--engine-args: {error}. Correct or omit it.") from error
    # the last two are raised for the model's files
    except (ValueError, OSError, StrictDataclassError, SafetensorError) as error:
        raise EngineRefused(f"vLLM refuses to serve {model}: {error}") from error


def refuse_unserved(arguments: Mapping[str, Any]) -> None:
    """Check ``LLM``'s arguments with vLLM and the plugin, without loading weights.

    Raises EngineRefused: an engine would not start with them; the message has the reason.
    """
    from vllm import EngineArgs

    with _refusals(arguments["model"]):
        EngineArgs(**arguments).create_engine_config()


def free_share() -> float:
    """The available share of the memory of which vLLM's CPU worker reserves a share."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return min(node.available_memory, available_memory()) / int(node.total_memory)


def usable_share() -> float:
    """The share to reserve on CPUs; vLLM fails if its default, 92 %, is not free."""
    return round(min(0.5, 0.8 * free_share()), 3)


class VllmEngine:
    """A vLLM engine that reports the tokens of every step of every request."""

    def __init__(
        self,
        arguments: Mapping[str, Any],  # of vLLM's ``LLM``
        sampling: Sampling,  # of every request
        *,
        seeded: bool = False,  # requests will have seeds
    ):
        """Start the engine.

        If requests will have seeds, prompts are never prefilled in chunks on CPUs: vLLM would
        stop with "CPU Generator does not use offset". Raises EngineRefused: vLLM or the plugin
        refuses the settings, or a file is missing.
        """
        import torch
        from vllm import LLM

        from vllm_medusa.config import reuse_compiled_models

        reuse_compiled_models()
        self.sampling = sampling
        defaults: dict[str, Any] = {"log_level": "ERROR"}
        if not torch.accelerator.is_available():
            if seeded:
                defaults["enable_chunked_prefill"] = False
            if not MEMORY_OPTIONS & arguments.keys():
                defaults["gpu_memory_utilization"] = usable_share()
        with _refusals(arguments["model"]):
            self.llm: LLM = LLM(**defaults | dict(arguments))

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
        kind = RequestOutputKind.DELTA  # one output per engine step
        try:
            params = SamplingParams(**arguments, seed=seed, output_kind=kind)
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
            return prompt_ids(messages, self.llm.get_tokenizer())
        except PromptError as error:
            raise RequestRefused(str(error)) from None

    def close(self) -> None:
        """Stop the engine and its processes."""
        self.llm.llm_engine.engine_core.shutdown()
