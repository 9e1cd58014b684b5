"""Test cases from seeds: a seed always gives the same engine or request."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from support.assets import VOCAB, tokenizer
from support.runner import ON_V2, sized

MAX_MODEL_LEN = 256
PER_ENGINE = 1000  # request seeds per engine seed
STOPS = list(range(1, VOCAB, 61))  # end tokens of the model
ADAPTERS = 2
THOUGHTS = ("(", "return x is done")  # start and end of reasoning
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes", "no"]}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_GRAMMARS = (
    {"choice": ["positive", "negative", "neither of them"]},
    {"regex": r"[a-z]{3,9}\.[0-9]{2,6} (yes|no)"},
    {"json": json.dumps(_SCHEMA)},
    {"grammar": 'root ::= "(" [a-z]+ ")" | "[" [0-9]+ "]"'},
)
EAGLE = {  # drafters with a KV cache: vLLM's methods
    "eagle": "eagle",
    "parallel": "eagle3",
    "mtp": "mtp",
}
MTP_TARGETS = ("mimo", "glm", "ernie", "hunyuan", "exaone")  # and those with MLA
LATENT_MTP = ("deepseek_mtp", "glm_lite")
LATENT = ("deepseek", *LATENT_MTP)  # targets with MLA
_GROUPS = {"exaone": 4}  # KV cache groups, if more than one
_KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)


@dataclass(frozen=True)
class EngineCase:
    """An engine with trees, and the settings that a plain one needs for the same output."""

    seed: int
    speculation: dict[str, Any]  # without the heads
    options: dict[str, Any]
    shared: dict[str, Any]  # options also of the plain engine
    miss: float  # probability that a planted token is wrong
    fickle: bool  # a new random budget every step
    greedy: bool  # dynamic trees may preempt requests
    ahead: bool = False  # asynchronous scheduling
    drafter: str = "medusa"  # or hydra, or one of `EAGLE`
    target: str = "llama"  # or deepseek, or one with an MTP module


@dataclass(frozen=True)
class RequestCase:
    """A request, its arrival step, and the number of tokens after which it is aborted."""

    seed: int
    prompt: list[int]
    params: dict[str, Any] = field(repr=False)
    step: int
    abort_after: int | None
    priority: int
    adapter: int  # 0: none
    embedded: bool  # the prompt is passed as embeddings, if the engine supports them

    def sampling(self) -> SamplingParams:
        """New parameters each time, because vLLM modifies them."""
        return SamplingParams(**self.params)


def engine_case(seed: int) -> EngineCase:
    rng = random.Random(f"engine {seed}")
    kind = rng.choice(("tree", "tree", "dense", "budget", "rows", "auto"))
    nodes = rng.choice(sized((1, 3, 7, 14, 31, 63), (1, 3, 7)))
    speculation: dict[str, Any] = {
        "tree": {"tree": _random_tree(rng, nodes)},
        "dense": {"tree": {"dense": rng.choice([[2, 2], [3, 2, 2], [1, 1, 1], [4]])}},
        "budget": {"budget": nodes},
        "rows": {"budget": {"max_rows": rng.choice((8, 32, 64))}},
        "auto": {"budget": "auto"},
    }[kind]
    if rng.random() < 0.2:
        speculation["num_speculative_tokens"] = rng.randint(1, 20)
    block = rng.choice((32, 32, 32, 32, 64, 128))
    fewest = MAX_MODEL_LEN // block + 1
    batched = rng.choice((64, 96, 160, 512, 4096))
    options: dict[str, Any] = {
        "block_size": block,
        "max_num_batched_tokens": batched,
        "max_num_seqs": rng.choice((1, 4, 8, 12, 16, 16)),
        "enable_prefix_caching": rng.random() < 0.6,
        "scheduling_policy": rng.choice(("fcfs", "fcfs", "priority")),
    }
    if rng.random() < 0.75:  # too few blocks for all: requests are preempted
        options["num_gpu_blocks_override"] = fewest + rng.choice((1, 1, 3, 6, fewest, 2 * fewest))
    shared: dict[str, Any] = {}
    if rng.random() < 0.25:
        shared = {"enable_lora": True, "max_loras": ADAPTERS + 1, "max_lora_rank": 8}
        speculation.pop("num_speculative_tokens", None)  # vLLM sets its own limit
    elif rng.random() < 0.3 and not ON_V2:
        shared = {"enable_prompt_embeds": True}
    case = EngineCase(
        seed,
        speculation,
        options,
        shared,
        miss=rng.choice((0.0, 0.1, 0.4)),
        fickle=kind in ("rows", "auto"),
        greedy=rng.random() < 0.5,
        ahead=ON_V2 and rng.random() < 0.5,
    )
    return _varied(case, random.Random(f"more {seed}"))


def _varied(case: EngineCase, rng: random.Random) -> EngineCase:
    """The same, possibly with another drafter, with lookup or with thinking budgets."""
    speculation, options, shared = dict(case.speculation), dict(case.options), dict(case.shared)
    drafter, fickle = rng.choice(("medusa", "medusa", "hydra", *EAGLE)), case.fickle
    if drafter in EAGLE and "enable_prompt_embeds" in shared:  # refused
        drafter = "hydra"
    if drafter in EAGLE:
        tree = rng.choice(("chain", "dynamic", {"width": 2, "depth": 2}, {"width": 3, "depth": 4}))
        budget = rng.choice((4, 12, "auto", {"max_rows": 32}))
        speculation, fickle = {"tree": tree, "budget": budget}, not isinstance(budget, int)
        width = tree["width"] if isinstance(tree, dict) else {"chain": 5, "dynamic": 10}[tree]
        rows = options["max_num_batched_tokens"]  # for one level of all requests, or all levels
        options["max_num_seqs"] = min(options["max_num_seqs"], rows // width)
        if shared:  # vLLM requires one for each row of each request
            options["max_num_batched_tokens"] = 4096
    grows = speculation["tree"] != "chain" if drafter in EAGLE else "tree" not in speculation
    if grows and rng.random() < 0.3:
        speculation["lookup"] = True
    if not ON_V2 and rng.random() < 0.25:  # plain vLLM loses the state when preempted
        shared["reasoning_config"] = ReasoningConfig(
            reasoning_start_str=THOUGHTS[0], reasoning_end_str=THOUGHTS[1]
        )
        options.pop("num_gpu_blocks_override", None)
    target = "llama"
    if drafter == "mtp" and "enable_lora" in shared:
        target = "mimo"  # whose adapters are saved
    elif drafter == "mtp":
        target = rng.choice(sized((*MTP_TARGETS, *LATENT_MTP), MTP_TARGETS))
        if "num_gpu_blocks_override" in options:
            options["num_gpu_blocks_override"] *= _GROUPS.get(target, 1)
    elif not (ON_V2 or drafter in EAGLE or shared) and rng.random() < 0.3:
        target = "deepseek"
    if target in LATENT:  # whole prompts, without a prefix cache
        shared["attention_backend"] = "CPU_MLA"
        options |= {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}
        if "num_gpu_blocks_override" in options:  # blocks have 16 tokens
            options["num_gpu_blocks_override"] = MAX_MODEL_LEN // 16 + rng.randint(1, 24)
    return replace(
        case,
        target=target,
        speculation=speculation,
        options=options,
        shared=shared,
        fickle=fickle,
        drafter=drafter,
    )


def request_case(seed: int) -> RequestCase:
    rng = random.Random(f"request {seed}")

    def maybe(chance: float) -> bool:
        return rng.random() < chance

    family = random.Random(f"prefix {rng.randrange(4)}")
    prefix = [family.randrange(3, VOCAB) for _ in range(sized(96, 40))]
    prompt = prefix[: rng.choice((0, 0, 5, len(prefix)))]
    prompt += [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, sized(50, 10)))]
    if maybe(0.05) and not ON_V2:  # almost no room below max_model_len
        room = rng.randint(1, 12)
        prompt += [rng.randrange(3, VOCAB) for _ in range(MAX_MODEL_LEN - room - len(prompt))]
    maximum = rng.randint(1, sized(60, 14))
    params: dict[str, Any] = {
        "seed": 100 * seed,
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.3)),
        "max_tokens": None if maybe(0.04) and not ON_V2 else maximum,
        "ignore_eos": maybe(0.4),
        "output_kind": rng.choice(_KINDS),
    }
    if maybe(0.3):
        params |= {"top_p": rng.choice((0.5, 0.9, 0.99))}
    if maybe(0.3):
        params |= {"top_k": rng.choice((1, 5, 40))}
    for name, values in (
        ("presence_penalty", (-0.5, 0.7, 1.5)),
        ("frequency_penalty", (-0.5, 0.4)),
        ("repetition_penalty", (0.9, 1.3)),
    ):
        if maybe(0.15):
            params[name] = rng.choice(values)
    if maybe(0.25):
        few = sized(VOCAB // 20, 50)  # V2 allows 128 including the model's
        params["stop_token_ids"] = rng.sample(range(3, VOCAB), few)
    if maybe(0.25):
        params["min_tokens"] = rng.randint(0, maximum)
    if maybe(0.3):  # one kind per batch: vLLM 0.32 mixes them up between requests
        if seed // PER_ENGINE % 8 == 7:
            params["logprob_token_ids"] = rng.sample(range(VOCAB), 3)
        else:
            params["logprobs"] = rng.choice((0, 1, 5))
    if maybe(0.1):
        params["prompt_logprobs"] = rng.choice((0, 3))
    if maybe(0.1):
        params["n"] = rng.choice((2, 3))
    if maybe(0.05):
        params["skip_reading_prefix_cache"] = True
    if maybe(0.2):
        params["stop"] = rng.sample(["e", "in", "self", "\n", "()", "a", "th"], 2)
        params["include_stop_str_in_output"] = maybe(0.5)
    elif maybe(0.1):
        params["detokenize"] = False
    if maybe(0.1):
        params["skip_special_tokens"] = False
    if maybe(sized(0.12, 0.3)):
        params["structured_outputs"] = StructuredOutputsParams(**rng.choice(_GRAMMARS))
    elif maybe(0.15):
        allowed = rng.sample(range(3, VOCAB), rng.choice((2, 40, 400)))
        params["allowed_token_ids"] = allowed
        if len(allowed) > 2 and maybe(0.6):
            words = [tokenizer().decode(allowed[i : i + 1 + i % 2]) for i in range(6)]
            params["bad_words"] = [word for word in words if word.strip()]
        if maybe(0.4):
            params["repetition_detection"] = RepetitionDetectionParams(4, 1, 3)
    if params["temperature"] == 0 and maybe(0.2):  # still exact
        params["extra_args"] = {"medusa": {"acceptance": "typical"}}
    streams = params["output_kind"] is not RequestOutputKind.FINAL_ONLY and "n" not in params
    return RequestCase(
        seed,
        prompt,
        params,
        step=rng.randint(0, 30),
        abort_after=rng.randint(1, maximum) if streams and maybe(0.08) else None,
        priority=rng.randint(0, 3),
        adapter=rng.randint(0, ADAPTERS),
        embedded=maybe(0.5)  # vLLM 0.32 penalizes other requests' tokens as the prompt's
        and not params.keys() & {"prompt_logprobs", "repetition_penalty"},
    )


def requests_of(case: EngineCase, seeds: Sequence[int]) -> list[RequestCase]:
    """The requests of these seeds, without those that crash plain vLLM 0.32 with these options."""
    requests = [request_case(seed) for seed in seeds]
    if "enable_lora" in case.shared:  # einsum of the LM head with adapters, over prompt rows
        for request in requests:
            request.params.pop("prompt_logprobs", None)
    if "reasoning_config" in case.shared:
        requests = [_thinking(r, random.Random(f"thought {r.seed}")) for r in requests]
    return requests


def _thinking(request: RequestCase, rng: random.Random) -> RequestCase:
    """Reasoning starts and ends in prompts and in answers; some requests have a budget."""
    prompt, params = list(request.prompt), dict(request.params)
    begin, end = (tokenizer().encode(text, add_special_tokens=False) for text in THOUGHTS)
    for part, chance in ((begin, 0.6), (end, 0.2), (begin, 0.2)):
        if rng.random() < chance and len(prompt) >= len(part):
            at = rng.randint(0, len(prompt) - len(part))
            prompt[at : at + len(part)] = part
    follows = "structured_outputs" in params  # plain vLLM would force tokens that grammars forbid
    if rng.random() < 0.6 and not follows:
        params["thinking_token_budget"] = rng.choice((0, 1, 2, 5, 12, 40))
        params.pop("extra_args", None)  # not supported with typical acceptance
    if rng.random() < 0.4 and not (follows or "allowed_token_ids" in params):
        few = {*begin, *end, *rng.sample(range(3, VOCAB), 6)}
        params["allowed_token_ids"] = sorted(few)
    return replace(request, prompt=prompt, params=params)


def _random_tree(rng: random.Random, nodes: int) -> list[list[int]]:
    """Paths with up to four choices per node; a node's children are its best choices."""
    children: dict[tuple[int, ...], int] = {(): 0}
    paths: list[list[int]] = []
    while len(paths) < nodes:
        parent = rng.choice([path for path in children if len(path) < 4])
        path = (*parent, children[parent])
        children[parent] += 1
        children[path] = 0
        paths.append(list(path))
    return paths
