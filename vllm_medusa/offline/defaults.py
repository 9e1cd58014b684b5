"""Prompt lengths, and engine arguments that fit them into the available memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from vllm_medusa.job import SILENT, Progress, plural
from vllm_medusa.offline.conversations import prompt_ids
from vllm_medusa.offline.machine import available_memory
from vllm_medusa.offline.prompts import BadLines, Prompt, PromptError, settle_bad_lines

COMPILE_FROM = 50_000  # min generated tokens to compile the model, which takes about a minute
ENGINE_BYTES = 3 << 29  # of vLLM's process, excluding weights and cache
_BLOCK = 128  # tokens per block of vLLM's cache on CPUs
_DRAFTS = 256  # slots for tree nodes
_SLACK = 64  # extra tokens, for answers that grow when re-tokenized and for final drafts
_MIN_CACHE = 1 << 28
_SHARE = 0.7  # of the memory left by weights and processes, for the cache
_GPU_SHARE = 0.84  # of a GPU's memory, for all engines together
# LLM arguments with which the target's folder does not determine prompt tokens and their limit.
CHANGE_MODEL = {
    *("tokenizer", "tokenizer_mode", "tokenizer_revision"),
    *("hf_overrides", "hf_config_path", "config_format", "revision"),
}


@dataclass(frozen=True)
class Length:
    """Tokens of a prompt, counted by the target's tokenizer."""

    whole: int  # all turns, without answers
    turns: int = 1  # number of answers

    def positions(self, max_tokens: int) -> int:
        """Max positions of prompt and answers."""
        return self.whole + self.turns * max_tokens


def measure(
    path: Path,  # of the prompts
    prompts: Iterable[Prompt],
    tokenizer: Any,
    room: int | None,  # max tokens before the first answer; None: unknown
    on_bad_line: str,
    progress: Progress = SILENT,
) -> dict[int, Length]:
    """Count the tokens of each line's prompt.

    A prompt that the chat template refuses, or that is longer than ``room``, is a bad line; see
    `settle_bad_lines`. Warns of conversations without a chat template, and of texts with one.
    """
    lengths: dict[int, Length] = {}
    bad: BadLines = {}
    conversations = texts = 0
    for prompt in prompts:
        conversations += bool(prompt.turns)
        texts += prompt.text is not None
        try:
            first, length = _count(prompt, tokenizer)
            if room is not None and first > room:
                raise PromptError(f"{first} tokens; the target's limit before an answer is {room}")
            lengths[prompt.line] = length
        except PromptError as error:
            bad[prompt.line] = str(error)
    settle_bad_lines(path, bad, on_bad_line, progress)
    if conversations and tokenizer.chat_template is None:
        progress.warn(
            f"the target has no chat template, so {plural(conversations, 'conversation')} of "
            f"{path.name} will be plain text, turn by turn. If it has a template elsewhere, save "
            "it in the target's folder as chat_template.jinja first."
        )
    if texts and tokenizer.chat_template is not None:
        progress.warn(
            f"{plural(texts, 'prompt')} of {path.name} will be continued as plain text, without "
            "the target's chat template, which a chat model may answer with nothing. For chats, "
            'use rows such as {"messages": [{"role": "user", "content": "..."}]}.'
        )
    return lengths


def _count(prompt: Prompt, tokenizer: Any) -> tuple[int, Length]:
    """Tokens before the first answer, and of the whole prompt."""
    if not prompt.turns:
        ids = prompt.token_ids or tokenizer(prompt.text, verbose=False)["input_ids"]
        return len(ids), Length(len(ids))
    messages = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
    first = whole = len(prompt_ids(messages, tokenizer))
    for turn in prompt.turns[1:]:
        messages.append({"role": "assistant", "content": "..."})
        messages.append({"role": "user", "content": turn})
    if len(prompt.turns) > 1:
        whole = len(prompt_ids(messages, tokenizer))
    return first, Length(whole, len(prompt.turns))


@contextmanager
def readable(target: str) -> Iterator[None]:
    """Turn errors in reading a target's config or tokenizer into ValueError."""
    try:
        yield
    except Exception as error:  # transformers and its libraries may raise anything
        reason = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")  # first paragraph
        raise ValueError(
            f"{target} can't be read as a model: {reason}. Pass a folder with the model's "
            "config.json, tokenizer and safetensors."
        ) from None


def read_limits(target: str, arguments: Mapping[str, Any]) -> tuple[Any, int | None]:
    """The target's tokenizer, and the max tokens of a prompt in an engine with these arguments.

    The limit is at least vLLM's; None: unknown, for example if the arguments change the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    trusted = {"trust_remote_code": bool(arguments.get("trust_remote_code"))}
    with readable(target):
        tokenizer = AutoTokenizer.from_pretrained(target, **trusted)
        config = AutoConfig.from_pretrained(target, **trusted).get_text_config()
    limit = arguments.get("max_model_len")
    if not isinstance(limit, int) or limit < 1:  # vLLM's default, or the longest that fits
        rope = getattr(config, "rope_parameters", None) or {}
        each = (rope, *(part for part in rope.values() if isinstance(part, dict)))  # layer types
        scaled = max(1, *(part.get("factor") or 1 for part in each))
        known = ("max_position_embeddings", "model_max_length")  # the latter of Cohere's models
        limit = scaled * max(getattr(config, name, None) or 0 for name in known)
    return tokenizer, int(limit) - 1 if limit and not CHANGE_MODEL & arguments.keys() else None


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target that determine its engine's memory."""

    values: int  # number of weights
    weights: int  # bytes
    per_token: int  # bytes of the key-value cache
    positions: int | None  # max positions, if in its config

    @classmethod
    def of(cls, target: str, dtype: str = "auto") -> TargetSizes:
        """Read them from a folder or hub name; ``dtype`` is a vLLM dtype."""
        from transformers import AutoConfig

        from vllm_medusa.heads.files import find_target

        with readable(target):
            config = AutoConfig.from_pretrained(target).get_text_config()
        own = str(getattr(config, "dtype", None) or "float32")
        size = 4 if (own if dtype == "auto" else dtype).endswith(("float32", "float")) else 2
        files = find_target(target)
        values = sum(spec.num_values for spec in files.specs(files.files).values())
        queries = getattr(config, "num_attention_heads", None) or 1
        heads = getattr(config, "num_key_value_heads", None) or queries
        width = getattr(config, "head_dim", None) or config.hidden_size // queries
        return cls(
            values=values,
            weights=values * size,
            per_token=2 * config.num_hidden_layers * heads * width * size,
            positions=getattr(config, "max_position_embeddings", None),
        )


@dataclass(frozen=True)
class EnginePlan:
    """Start-up settings of a job's engines."""

    arguments: dict[str, Any]  # further arguments of LLM
    memory: int | None = None  # bytes of all engines together; None: vLLM's default


def plan_engine(
    target: str,  # folder or hub name
    lengths: Iterable[int],  # max positions of each text
    batch: int,  # concurrent texts
    max_model_len: int | None = None,  # if set by the user
    *,
    dtype: str = "auto",
    tokens: int | None = None,  # max generated tokens, if few are not worth compiling for
    engines: int = 1,  # running concurrently on this machine
) -> EnginePlan:
    """Default engine arguments.

    On CPUs a small job may run eagerly, which starts sooner, and the key-value cache holds the
    longest ``batch`` texts; if that is too much memory, vLLM runs fewer at a time. On a GPU,
    several engines share its memory. Prefix caching is off, so that rounds are comparable.

    Raises ValueError: not even one text fits.
    """
    import torch

    arguments: dict[str, Any] = {"enable_prefix_caching": False}
    if torch.accelerator.is_available():
        if engines > 1:
            arguments["gpu_memory_utilization"] = round(_GPU_SHARE / engines, 2)
        return EnginePlan(arguments)
    if tokens is not None and tokens < COMPILE_FROM:
        arguments["enforce_eager"] = True
    if max_model_len is not None:
        return EnginePlan(arguments)
    sizes = TargetSizes.of(target, dtype)
    limit = sizes.positions or 1 << 31
    longest = nlargest(batch, (min(n, limit) for n in lengths))
    slots = [-(-(n + _DRAFTS) // _BLOCK) * _BLOCK for n in longest]
    # one more block, which vLLM reserves
    one, all_ = ((_BLOCK + n) * sizes.per_token for n in (slots[0], sum(slots)))
    fixed, available = sizes.weights + ENGINE_BYTES, available_memory()
    room = int(_SHARE * (available / engines - fixed))
    if one > room:
        raise ValueError(
            f"{plural(engines, 'engine')} with a text of {longest[0]} tokens: "
            f"{engines * (fixed + one / _SHARE) / 1e9:.1f} GB of memory needed, "
            f"{available / 1e9:.1f} GB available. Free memory, lower the tokens per answer, omit "
            "the longest prompts, or use a smaller --dtype."
        )
    cache = min(room, max(_MIN_CACHE, all_))
    arguments["max_model_len"] = min(limit, longest[0] + _SLACK)
    arguments["kv_cache_memory_bytes"] = cache
    return EnginePlan(arguments, engines * (fixed + cache))
