"""Run requests through an engine: each arrives at its step, and all outputs are recorded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from support.assets import TARGET, VOCAB
from support.budgets import fickle, scheduler_of
from support.eagle import Eagle1, Eagle3
from support.engines import engine, metric
from support.fuzz.cases import ADAPTERS, EAGLE, MAX_MODEL_LEN, STOPS, EngineCase, RequestCase
from support.hydra import random_hydra
from support.lora import RANK, save_adapter
from support.mla import save_deepseek
from support.models import HIDDEN, save_model, save_random_heads
from support.mtp import KINDS, LAYERS, SHAPE, save_random
from support.planted import planted_by_seed
from support.runner import async_scheduling
from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.integration.startup import startup_timing
from vllm_medusa.integration.v1.history import install_moves

_MOST_STEPS = 20_000


@dataclass
class Said:
    """One output of a request, as delivered."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative: float | None = None


@dataclass
class Answer:
    """All outputs of a request, or why it was refused."""

    outputs: dict[int, Said] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    refused: str = ""


class Models:
    """Chaotic targets with the test model's tokenizer, drafters, and adapters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.drafters = {"medusa": save_random_heads(folder / "heads", vocab=VOCAB)}
        self.drafters["hydra"] = str(folder / "hydra")
        save_heads(folder / "hydra", random_hydra(vocab=VOCAB))
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(self.target("llama"), dtype=torch.float32)
        self.drafters["eagle"] = Eagle1(model).save(folder / "eagle")
        embedding = model.get_input_embeddings().weight
        parallel = Eagle3(embedding, torch.arange(1, VOCAB, 2), (0, 1))
        parallel.draft_in_parallel()
        self.drafters["parallel"] = parallel.save(folder / "parallel", num_aux_hidden_states=2)

    def target(self, name: str) -> str:
        """The path of an `EngineCase.target`, saved when it is first used."""
        path = self._folder / name
        if not path.exists():
            sizes: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": STOPS}
            if name in KINDS:
                save_random(path, KINDS[name], **sizes)
            elif name == "deepseek":
                save_deepseek(path, **sizes)
            else:
                save_model(path, "Llama", **sizes)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(TARGET) / file, path)
        return str(path)

    def adapters(self, target: str) -> list[LoRARequest | None]:
        """No adapter, and those of a target, saved when they are first used."""
        mimo = target == "mimo"  # vLLM has no adapters of its LM head
        changes = SHAPE | {"num_hidden_layers": LAYERS} if mimo else {}
        found: list[LoRARequest | None] = [None]
        for i in range(1, ADAPTERS + 1):
            path = self._folder / f"adapter {i} of {target}"
            if not path.exists():
                save_adapter(path, i, lm_head=i == 1 and not mimo, vocab=VOCAB, **changes)
            found.append(LoRARequest(f"adapter{i}", i, str(path)))
        return found


@dataclass
class Run:
    """The answers of an engine to requests."""

    answers: dict[int, Answer]  # by the request's seed
    preemptions: int = 0
    accepted: int = 0
    problem: str = ""  # the engine failed, or leaked something


@contextmanager
def plain_engine(models: Models, case: EngineCase) -> Iterator[LLM]:
    """Room for everything at once: no chunks, no preemption, no cached prefixes."""
    install_moves()  # fixes a bug in vLLM 0.32
    with engine(models.target(case.target), skip_tokenizer_init=False,
                max_model_len=MAX_MODEL_LEN, max_num_seqs=64, **case.shared) as llm:  # fmt: skip
        yield llm


def run_with_trees(
    models: Models, case: EngineCase, requests: Sequence[RequestCase], plain: dict[int, Answer]
) -> Run:
    """Run the requests on the engine of a case; drafts are plain vLLM's outputs."""
    method = EAGLE.get(case.drafter, "medusa")
    config = {"method": method, **case.speculation}
    if method != "mtp":
        config["model"] = models.drafters[case.drafter]
    known = {
        100 * request.seed + index: said.tokens
        for request in requests
        if "structured_outputs" not in request.params
        for index, said in plain[request.seed].outputs.items()
    }
    run = Run({})
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(startup_timing, "SECONDS", 0.0)
        if case.ahead:
            stack.enter_context(async_scheduling())
        llm = stack.enter_context(
            engine(models.target(case.target), config, skip_tokenizer_init=False,
                   max_model_len=MAX_MODEL_LEN, **case.options, **case.shared)
        )  # fmt: skip
        if case.fickle:
            fickle(patch, llm)
        if case.greedy and "budget" in case.speculation:
            patch.setattr(scheduler_of(llm), "_free_slots", lambda: 1 << 20)
        stack.enter_context(planted_by_seed(known, VOCAB, seed=case.seed, miss=case.miss))
        try:
            run.answers = drive(llm, models, case, requests)
        except Exception as error:
            run.problem = f"the engine failed: {type(error).__name__}: {error}"
            return run
        run.preemptions = metric(llm, "num_preemptions")
        run.accepted = metric(llm, "spec_decode_num_accepted_tokens")
        if not llm.reset_prefix_cache():
            run.problem = "cache blocks are still in use after the last request"
    return run


def drive(
    llm: LLM,
    models: Models,
    case: EngineCase,
    requests: Sequence[RequestCase],
    at_once: bool = False,
) -> dict[int, Answer]:
    """Step the engine until all requests have ended; ``at_once``: all arrive first, none aborts."""
    core = llm.llm_engine
    waiting = sorted(requests, key=lambda request: request.step, reverse=True)
    adapters = models.adapters(case.target) if "enable_lora" in case.shared else [None]
    by_id = {str(request.seed): request for request in requests}
    answers = {request.seed: Answer() for request in requests}
    step = 0
    while waiting or core.has_unfinished_requests():
        while waiting and (at_once or waiting[-1].step <= step):
            request = waiting.pop()
            try:
                core.add_request(
                    str(request.seed),
                    _prompt(case, request),
                    request.sampling(),
                    lora_request=adapters[request.adapter % len(adapters)],
                    priority=request.priority * (case.options["scheduling_policy"] == "priority"),
                )
            except (VLLMValidationError, ValueError) as error:
                answers[request.seed].refused = f"{type(error).__name__}: {error}"
        for output in core.step() if core.has_unfinished_requests() else ():
            request = by_id[output.request_id]
            answer = answers[request.seed]
            _add(answer, output, request.params["output_kind"])
            limit = None if at_once or output.finished else request.abort_after
            if limit is not None and len(answer.outputs[0].tokens) >= limit:
                core.abort_request([output.request_id])
        step += 1
        if step > _MOST_STEPS:
            raise RuntimeError(f"{_MOST_STEPS} steps, but requests are still running")
    return answers


def _prompt(case: EngineCase, request: RequestCase) -> Any:
    if not (request.embedded and "enable_prompt_embeds" in case.shared):
        return {"prompt_token_ids": request.prompt}
    generator = torch.Generator().manual_seed(request.seed)
    return {"prompt_embeds": 0.3 * torch.randn(len(request.prompt), HIDDEN, generator=generator)}


def _add(answer: Answer, output: Any, kind: RequestOutputKind) -> None:
    if output.prompt_logprobs is not None:
        answer.prompt_logprobs = _plain(output.prompt_logprobs)
    for part in output.outputs:
        said = answer.outputs.setdefault(part.index, Said())
        if kind is RequestOutputKind.DELTA:
            said.tokens += part.token_ids
            said.text += part.text
            said.logprobs += _plain(part.logprobs or [])
        else:
            said.tokens, said.text = list(part.token_ids), part.text
            said.logprobs = _plain(part.logprobs or [])
        if part.finish_reason is not None:
            said.finish_reason, said.stop_reason = part.finish_reason, part.stop_reason
        said.cumulative = part.cumulative_logprob


def _plain(logprobs: Any) -> list[Any]:
    """Ignore impossible tokens that pad a list when a grammar allows few tokens."""
    return [
        {
            token: (entry.rank, entry.logprob)
            for token, entry in (place or {}).items()
            if entry.logprob > float("-inf")
        }
        for place in logprobs
    ]


assert RANK == 8, "engine_case sets max_lora_rank"
