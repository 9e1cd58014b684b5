r"""Steps that drafts save requests which follow a JSON schema.

    python -m benchmarks grammar tests/assets/target tests/assets/heads

The arms: a step a token; a chain whose masks and drafts end where the grammar first forbids one,
which is what vLLM does; trees with masks along every branch, of which the grammar chose the nodes,
from the heads' drafts alone and with the tokens that it all but forces. Steps are those in which a
request got tokens, its prefill left out; answers have to be plain vLLM's and to be what the schema
asks for. Counts hardly depend on the machine (masks may take a tenth of a step's time, which bounds
nodes), so none has to be quiet.

Times do: with `--rounds` the automatic budget takes turns with plain vLLM on batches that mix all
schemas; with `--waves 3` a turn has three answers for each place of the batch, which the next
request takes when one has ended, as in a server.

    python -m benchmarks grammar tests/assets/target tests/assets/heads \
        --rounds 7 --batch 1 16 --waves 3
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import AUTOMATIC, ArmOptions
from benchmarks.case import Case, Row
from benchmarks.schemas import SCHEMAS
from vllm_medusa.job import Progress
from vllm_medusa.options import Dtype, FromZero, Positive, option

SEED = 0
ASKED = "# a document that follows the schema {schema}\ndocument = "
NO_DRAFTS, CHAIN, HEADS, TREES = "no drafts", "chain", "tree, heads alone", "tree"


class GrammarOptions(ArmOptions):
    """What is measured."""

    prompts: Positive = option("answers of each schema", default=4)
    nodes: Positive = option("draft nodes of a tree", default=10)
    batch: tuple[Positive, ...] = option("requests at a time; counts don't change", default=(8,))
    depth: Positive = option("of the chain", default=5)
    max_tokens: Positive = option("of each answer", default=256)
    rounds: FromZero = option("timed, of all schemas mixed; 0: steps are counted", default=0)
    waves: Positive = option("timed answers for each place of the batch", default=1)
    dtype: Dtype = option(default="float32")


@dataclass(frozen=True)
class Answer:
    """What a request gave."""

    token_ids: tuple[int, ...]
    text: str
    complete: bool
    steps: int


def run(options: GrammarOptions, progress: Progress) -> Iterator[Row]:
    """A row for each temperature, schema and arm."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the grammar's choice is replaced here
    medusa = {"method": "medusa", "model": str(options.heads.absolute())}
    if options.rounds:
        yield from _timed(options, medusa, progress)
        return
    arms: dict[str, tuple[Any, Any]] = {
        NO_DRAFTS: (None, None),
        CHAIN: (medusa | {"tree": {"chain": options.depth}}, _as_chain),
        HEADS: (medusa | {"budget": options.nodes}, _heads_alone),
        TREES: (medusa | {"budget": options.nodes}, None),
    }
    wanted: Mapping[tuple[float, str], list[Answer]] = {}
    for arm, (config, choose) in arms.items():
        progress.note(arm)
        with _choosing(choose):
            found = _answers(options, config)
        wanted = wanted or found
        for temperature in options.temperatures:
            for name in SCHEMAS:
                yield _row(arm, name, temperature, found, wanted)
            yield _row(arm, "all", temperature, found, wanted)


def _row(arm: str, name: str, temperature: float, found: Any, wanted: Any) -> Row:
    names = list(SCHEMAS) if name == "all" else [name]
    ours = [answer for each in names for answer in found[temperature, each]]
    plain = [answer for each in names for answer in wanted[temperature, each]]
    wrong = sum(a.token_ids != b.token_ids for a, b in zip(ours, plain, strict=True))
    unlike = [a.text for a in ours if a.complete and not _is_json(a.text)]
    steps, before = (sum(answer.steps for answer in each) for each in (ours, plain))
    what = {
        "name": f"{arm}, {name}, T {temperature:g}",
        "arm": arm, "schema": name, "temperature": temperature,
    }  # fmt: skip
    numbers = {
        "tokens": sum(len(answer.token_ids) for answer in ours),
        "complete": f"{sum(answer.complete for answer in ours)}/{len(ours)}",
        "steps": steps,
        "saved": 1 - steps / before,
    }
    reason = f"{wrong} of {len(ours)} answers differ from plain vLLM's; no JSON: {unlike[:1]}"
    return Row(what, numbers, right=not (wrong or unlike), failed=reason if wrong or unlike else "")


def _timed(options: GrammarOptions, medusa: Any, progress: Progress) -> Iterator[Row]:
    """A row for each temperature and batch: both engines answer the same requests in turn."""
    engines = {NO_DRAFTS: _engine(options, None), AUTOMATIC: _engine(options, medusa)}
    for batch in options.batch:
        for temperature in options.temperatures:
            progress.note(f"batch {batch}, T {temperature:g}")
            ratios, wrong, tokens = [], 0, 0
            for number in range(-1, options.rounds):  # the first one doesn't count
                requests = _mixed(options, batch * options.waves, temperature)
                order = list(engines.items())
                answers, seconds = {}, {}
                for arm, llm in order if number % 2 else reversed(order):
                    begun = time.perf_counter()
                    answers[arm] = _serve(llm, requests, batch)
                    seconds[arm] = time.perf_counter() - begun
                pairs = zip(*answers.values(), strict=True)
                wrong += sum(ours != plain for ours, plain in pairs)
                if number >= 0:
                    ratios.append(seconds[NO_DRAFTS] / seconds[AUTOMATIC])
                    tokens += sum(map(len, answers[AUTOMATIC]))
            what = {
                "name": f"{AUTOMATIC}, all, T {temperature:g}, batch {batch}",
                "arm": AUTOMATIC, "schema": "all, mixed", "temperature": temperature,
                "batch": batch,
            }  # fmt: skip
            low, median, _ = statistics.quantiles(ratios, n=4, method="inclusive")
            numbers = {"tokens": tokens, "rounds": len(ratios)}
            times = {"ratio": median, "lower_quartile": low, "least": min(ratios)}
            reason = f"{wrong} answers differ from plain vLLM's" if wrong else ""
            yield Row(what, numbers | times, right=not wrong, failed=reason)


def _mixed(options: GrammarOptions, count: int, temperature: float) -> list[tuple[str, Any]]:
    """``count`` requests, of one schema after the other: prompts and sampling parameters."""
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(count)]
    return [
        (
            ASKED.format(schema=name),
            _params(options, json.dumps(SCHEMAS[name]), temperature, number),
        )
        for number, name in enumerate(names)
    ]


def _serve(llm: Any, requests: list[tuple[str, Any]], batch: int) -> list[tuple[int, ...]]:
    """The requests' tokens; ``batch`` of them run, each that ends makes place for the next."""
    engine, waiting = llm.llm_engine, list(enumerate(requests))[::-1]
    tokens: dict[int, tuple[int, ...]] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < batch:
            number, (prompt, params) = waiting.pop()
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = tuple(output.outputs[0].token_ids)
    return [tokens[number] for number in range(len(requests))]


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _answers(
    options: GrammarOptions, speculative_config: Any
) -> dict[tuple[float, str], list[Answer]]:
    llm = _engine(options, speculative_config)
    found: dict[tuple[float, str], list[Answer]] = {}
    for temperature in options.temperatures:
        for name, schema in SCHEMAS.items():
            text = json.dumps(schema)
            params = [
                _params(options, text, temperature, number)
                for number in range(options.prompts if temperature else 1)
            ]
            found[temperature, name] = _ask(llm, ASKED.format(schema=name), params)
    llm.llm_engine.engine_core.shutdown()
    return found


def _engine(options: GrammarOptions, speculative_config: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(options.target),
        speculative_config=speculative_config,
        dtype=options.dtype,
        enforce_eager=options.eager,
        max_model_len=1024,
        max_num_seqs=max(options.batch),
        kv_cache_memory_bytes=1 << 28,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


def _params(options: GrammarOptions, schema: str, temperature: float, number: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(
        temperature=temperature,
        seed=SEED + number,
        max_tokens=options.max_tokens,
        structured_outputs=StructuredOutputsParams(json=schema),
    )


def _ask(llm: Any, prompt: str, params: list[Any]) -> list[Answer]:
    """Step the engine by hand, to count each request's steps."""
    engine, last = llm.llm_engine, {}
    steps = dict.fromkeys(map(str, range(len(params))), -1)  # less the prefill
    for number, each in enumerate(params):
        engine.add_request(str(number), prompt, each)
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output.outputs[0]
            steps[output.request_id] += 1
    return [
        Answer(tuple(o.token_ids), o.text, o.finish_reason == "stop", steps[name])
        for name, o in ((name, last[name]) for name in steps)
    ]


@contextmanager
def _choosing(choose: Callable[..., Any] | None) -> Iterator[None]:
    """Within the block the grammar chooses drafts in another way; None: as it does."""
    from vllm_medusa.worker import grammar_drafts

    before = grammar_drafts.choose
    grammar_drafts.choose = choose or before
    try:
        yield
    finally:
        grammar_drafts.choose = before


def _as_chain(grammar: Any, drafts: Any, max_depth: int, *more: Any) -> Any:
    """Down to the first draft that is forbidden."""
    return drafts.first(len(grammar.validate_tokens(drafts.token_ids[:max_depth])))


def _heads_alone(grammar: Any, drafts: Any, max_depth: int, *more: Any) -> Any:
    """The drafts that are allowed, and no others."""
    kept = [
        node
        for node in range(1, 1 + len(drafts.parents))
        if len(path := drafts.path(node)) <= max_depth and grammar.validate_tokens(path) == path
    ]
    return drafts.subset(kept)


CASE = Case(
    GrammarOptions,
    run,
    {
        "schema": ("schema", ""),
        "temperature": ("T", "g"),
        "arm": ("drafts", ""),
        "tokens": ("tokens", ""),
        "complete": ("complete", ""),
        "steps": ("steps", ""),
        "saved": ("steps saved", ".0%"),
        "batch": ("batch", "d"),
        "ratio": ("speed against no drafts", ".2f"),
        "lower_quartile": ("lower quartile", ".2f"),
        "least": ("least", ".2f"),
    },
    quick={"prompts": 1, "temperatures": (0.8,)},
)
