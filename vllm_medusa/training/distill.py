"""The distill job: the target generates the texts that its heads are trained on.

This is self-distillation (Medusa, section 2.3.2). Every prompt is continued ``samples`` times;
sample s of prompt p has slot p * samples + s and seed ``seed + slot``, so a text depends neither on
other texts nor on where a job was resumed.

A conversation becomes one record with a span per answer, as long as the tokens generated in a
turn equal those in the next turn's prompt. Where they differ (the target chose other tokens for
the same text, or the chat template drops reasoning), a new record starts, so that no token
is trained in a context in which it was not generated.

Each slot has ``turns`` indices. Its last record gets the first one, ``slot * turns``, and is
written after the others: if the file contains it, the slot is finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_medusa.heads.provenance import provenance
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.batch import Answer, Conversation, Engine, Request, Result, Session
from vllm_medusa.offline.defaults import readable
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.generate import Generated, open_results, run_prompts
from vllm_medusa.offline.options import DistillOptions
from vllm_medusa.offline.prompts import Prompt, load_prompts
from vllm_medusa.offline.records import key_of
from vllm_medusa.training.self_talk import SelfTalk, require_self_talk

_SELF_TALK_TURNS = 3


def distill(
    options: DistillOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Generated:
    """Generate each text that is not in the output yet.

    Raises PromptError: invalid prompts; finished texts are kept; FileRefused: the output has other
    contents, or records of other settings; EngineRefused: vLLM or the plugin refuses the settings.
    """
    if options.prompts is not None:
        prompts = load_prompts(options.prompts, options.column, options.on_bad_line, progress)
    else:
        count = options.conversations or 0
        prompts = [Prompt(index, index + 1, f"talk-{index}") for index in range(count)]
    turns, tokenizer = max(1, max(len(prompt.turns) for prompt in prompts)), None
    if options.self_talk:
        turns, tokenizer = options.turns or _SELF_TALK_TURNS, _self_talk_tokenizer(options.model)
    plan = Plan(options.samples, options.temperature, options.seed, turns, tokenizer)
    settings = {
        "samples": plan.samples,
        "temperatures": list(plan.temperatures),
        "self_talk": options.self_talk,
        "turns": plan.turns,
    }
    top_p, top_k, stop = options.top_p, options.top_k, options.stop
    sampling = Sampling(options.max_tokens, max(plan.temperatures), top_p, top_k, stop)
    cut = ({"top_p": top_p} if top_p < 1 else {}) | ({"top_k": top_k} if top_k > 0 else {})
    early = conversations = 0

    def lines(result: Result) -> list[Mapping[str, Any]]:
        nonlocal early, conversations
        answers = sum(answer.role == "assistant" for answer in result.answers)
        early += options.self_talk and 0 < answers < plan.turns
        conversations += bool(answers)
        return [r | cut for r in plan.records(result) if r["index"] not in log.done]

    origin = provenance(command, [options.prompts] if options.prompts is not None else [])
    with open_results(options, sampling, options.seed, {"texts": settings}, origin) as log:
        speed = run_prompts(
            options,
            log,
            plan.slots(prompts, frozenset(log.done)),
            sampling,
            options.seed,
            lines,
            total=len(prompts) * plan.samples,
            done=sum(index % plan.turns == 0 for index in log.done),
            session=plan.session,
            progress=progress,
        )
        if early:
            progress.warn(
                f"{early} of {conversations} conversations ended before {plan.turns} answers: a "
                "text was truncated at --max-tokens, or a user turn was empty"
            )
        return Generated(options.output, log.failed, speed)


def _self_talk_tokenizer(model: str) -> Any:
    """The target's tokenizer, whose chat template must mark where turns start and end."""
    from transformers import AutoTokenizer

    with readable(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
    require_self_talk(tokenizer)
    return tokenizer


@dataclass(frozen=True)
class Plan:
    """The texts to generate for each prompt."""

    samples: int = 1  # texts per prompt
    temperatures: tuple[float, ...] = (0.0,)  # sample s uses entry s modulo the length
    seed: int = 0  # seed of slot 0
    turns: int = 1  # max answers, and thus max records, per text
    tokenizer: Any = None  # for self-talk: the target also generates the user's later turns

    def temperature(self, slot: int) -> float:
        """The temperature of a slot."""
        return self.temperatures[slot % self.samples % len(self.temperatures)]

    def slots(self, prompts: Iterable[Prompt], done: AbstractSet[int]) -> Iterator[Prompt]:
        """Yield each prompt once per sample; ``index`` becomes the slot.

        Slots whose last record's index is in ``done`` are skipped.
        """
        for prompt in prompts:
            for sample in range(self.samples):
                slot = prompt.index * self.samples + sample
                if slot * self.turns not in done:
                    name = f"#{sample}" if self.samples > 1 else ""
                    yield replace(prompt, index=slot, request_id=prompt.request_id + name)

    def session(self, prompt: Prompt) -> Session:
        """Create the session of a slot, for `vllm_medusa.offline.batch.run_batch`."""
        temperature = self.temperature(prompt.index)
        if self.tokenizer is not None:
            return SelfTalk(prompt, temperature, self.turns, self.tokenizer)
        return Sampled(prompt, temperature=temperature)

    def records(self, result: Result) -> list[dict[str, Any]]:
        """Return the lines of a finished slot in the order in which they are written.

        The slot's last line has the slot's first index. A slot without generated text yields a
        line with an "error".
        """
        slot = result.prompt.index
        pieces = _pieces(result.answers)
        if not pieces:
            name = {"index": slot * self.turns, "request_id": result.prompt.request_id}
            return [name | {"error": result.error or "the target generated nothing"}]
        first = next(a for a in result.answers if a.role == "assistant")  # not the user's opening
        prompt = list(first.prompt_token_ids)
        whole = prompt if len(prompt) > 1 else pieces[0].token_ids
        group = key_of(whole, len(prompt))
        return [
            {
                "index": slot * self.turns + number,
                "request_id": result.prompt.request_id,
                "group": group,
                "token_ids": piece.token_ids,
                "generated": piece.spans,
                "temperature": self.temperature(slot),
                "seed": self.seed + slot,
                "finish_reason": piece.finish_reason,
                "text": piece.text,
            }
            for number, piece in zip((*range(1, len(pieces)), 0), pieces, strict=True)
        ]


@dataclass
class Sampled(Conversation):
    """A conversation with its own temperature, which ends at the first truncated answer."""

    temperature: float = 0.0

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        return Request(super().next_request(engine).prompt, {"temperature": self.temperature})

    @property
    def finished(self) -> bool:
        """See `vllm_medusa.offline.batch.Session`."""
        return super().finished or self.answers[-1].finish_reason == "length"


@dataclass
class _Piece:
    """Tokens in the context in which they were generated, and the target's own spans in it."""

    token_ids: list[int]
    spans: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""


def _pieces(answers: Iterable[Answer]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for answer in answers:
        prompt = list(answer.prompt_token_ids)
        if not pieces or prompt[: len(pieces[-1].token_ids)] != pieces[-1].token_ids:
            pieces.append(_Piece([]))
        piece = pieces[-1]
        piece.token_ids = prompt + answer.token_ids
        if answer.role == "assistant" and answer.token_ids:
            piece.spans.append([len(prompt), len(piece.token_ids)])
            piece.finish_reason, piece.text = answer.finish_reason, answer.text
    for piece in pieces:  # drop user turns without an answer
        if piece.spans:
            del piece.token_ids[piece.spans[-1][1] :]
    return [piece for piece in pieces if piece.spans]
