"""Steps saved by drafts for requests with a JSON schema.

    python -m benchmarks grammar                            # steps, schema by schema
    python -m benchmarks grammar --rounds 7 --batch 1 16    # times, all schemas mixed

Masks follow every branch of a tree; the grammar selects nodes from the drafter's candidates, and
where it allows only a few tokens, these are added. Answers must equal plain vLLM's, and complete
ones must be JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.compare import COLUMNS, Form, arm_of
from benchmarks.engines import EngineOptions, Tasks, compare
from benchmarks.schemas import SCHEMAS
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Conversation, Engine, Request, Result
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import FromZero, Positive, option

QUESTION = "Write a JSON document for: {schema}. Answer with the document alone."
BACKEND = {"backend": "xgrammar", "disable_any_whitespace": True}


class GrammarOptions(EngineOptions):
    """Options of the benchmark."""

    forms: tuple[Form, ...] = option(default=("automatic", "dynamic", "chain"))
    nodes: Positive = option("draft nodes per tree", default=10)
    depth: Positive = option("draft tokens of the chain", default=3)
    prompts: Positive = option("answers per schema", default=4)
    batch: tuple[Positive, ...] = option("concurrent requests", default=(8,))
    rounds: FromZero = option("timed rounds, all schemas mixed; 0: only steps", default=0)
    waves: Positive = option("answers per batch slot and turn", default=3)
    max_tokens: Positive = option("max tokens per answer", default=256)


@dataclass
class Constrained(Conversation):
    """A prompt whose answer follows the schema named at the start of its id."""

    def next_request(self, engine: Engine) -> Request:
        """See `vllm_medusa.offline.batch.Session`."""
        from vllm.sampling_params import StructuredOutputsParams

        schema = SCHEMAS[self.prompt.request_id.partition(",")[0]]
        params = StructuredOutputsParams(json=json.dumps(schema))
        return replace(super().next_request(engine), options={"structured_outputs": params})


def tasks_of(options: GrammarOptions) -> Tasks:
    """The prompts of each schema; of all schemas in turn if times are measured."""
    found: Tasks = {schema: [] for schema in SCHEMAS}
    for number in range(options.prompts):
        for schema, own in found.items():
            index = number * len(SCHEMAS) + list(SCHEMAS).index(schema)
            question = (QUESTION.format(schema=schema),)
            own.append(Prompt(index, index + 1, f"{schema}, {number}", turns=question))
    if not options.rounds:
        return found
    every = [prompt for own in found.values() for prompt in own]
    return {"all schemas": sorted(every, key=lambda prompt: prompt.index)}


def judge(results: Sequence[Result]) -> dict[str, Any]:
    """The number of complete answers. Raises ValueError: a complete answer is not JSON."""
    complete = [r.answers[0].text for r in results if r.answers[0].finish_reason == "stop"]
    for text in complete:
        json.loads(text)
    return {"complete": f"{len(complete)}/{len(results)}"}


def run(options: GrammarOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, temperature and schema; ``saved`` is the share of plain vLLM's steps."""
    options = options.ready(progress)
    sizes = {"automatic": 0, "chain": options.depth}
    found = [
        arm_of(options.drafter, form, sizes.get(form, options.nodes)) for form in options.forms
    ]
    rows = compare(
        [arm for arm in found if arm],
        options,
        progress,
        tasks_of(options),
        waves=options.waves,
        session=Constrained,
        judge=judge,
        engine_args={"structured_outputs_config": BACKEND},
    )
    for row in rows:
        plain = row.numbers.get("plain_steps")
        saved = {"saved": 1 - row.numbers["steps"] / plain} if plain else {}
        yield replace(row, numbers={**row.numbers, **saved})


CASE = Case(
    GrammarOptions,
    run,
    COLUMNS | {"texts": ("schema", ""), "complete": ("complete", ""), "saved": ("saved", ".0%")},
    quick={"prompts": 1, "temperatures": (0.7,)},
)
