"""Compare with plain vLLM, and classify differences as rounding or errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from support.fuzz.cases import EngineCase, RequestCase, engine_case, requests_of
from support.fuzz.running import Answer, Models, Run, Said, drive, plain_engine, run_with_trees
from support.outcomes import assert_close, jittered
from support.runner import ON_V2


@dataclass
class Round:
    """Results of one engine and its requests."""

    requests: int
    run: Run
    unsteady: list[int] = field(default_factory=list)  # whose plain vLLM output varies
    wrong: dict[int, str] = field(default_factory=dict)  # request -> what differs
    refused: int = 0


def fuzz_round(models: Models, engine_seed: int, request_seeds: Sequence[int]) -> Round:
    """Compare the requests on the engine with plain vLLM."""
    case = engine_case(engine_seed)
    requests = requests_of(case, request_seeds)
    with plain_engine(models, case) as llm:
        plain = drive(llm, models, case, requests, at_once=True)
    run = run_with_trees(models, case, requests, plain)
    found = Round(len(requests), run, refused=sum(bool(a.refused) for a in plain.values()))
    different = _different(requests, plain, run)
    if different:
        odd = [request for request in requests if request.seed in different]
        found.unsteady = _unsteady(models, case, odd, plain)
    found.wrong = {seed: text for seed, text in different.items() if seed not in found.unsteady}
    return found


def reproduction(engine_seed: int, request_seeds: Sequence[int]) -> str:
    runner = " RUNNER=v2" if ON_V2 else ""
    return f"make fuzz ENGINE={engine_seed} REQUESTS={','.join(map(str, request_seeds))}{runner}"


def _different(
    requests: Sequence[RequestCase], plain: dict[int, Answer], run: Run
) -> dict[int, str]:
    if not run.answers:
        return {}
    texts = {r.seed: difference(r, plain[r.seed], run.answers[r.seed]) for r in requests}
    return {seed: text for seed, text in texts.items() if text}


def difference(request: RequestCase, plain: Answer, got: Answer) -> str:
    """Describe the difference; empty if there is none."""
    if plain.refused or got.refused:
        return "" if plain.refused == got.refused else f"{plain.refused!r} != {got.refused!r}"
    if request.abort_after is not None:  # the partial output must be a prefix of plain vLLM's
        one, two = plain.outputs[0], got.outputs.get(0, Said())
        return "" if two.tokens == one.tokens[: len(two.tokens)] else _tokens(one, two)
    if plain.outputs.keys() != got.outputs.keys():
        return f"outputs {sorted(plain.outputs)} != {sorted(got.outputs)}"
    for index, one in plain.outputs.items():
        two = got.outputs[index]
        if one.tokens != two.tokens:
            return _tokens(one, two)
        for name in ("text", "finish_reason", "stop_reason"):
            if getattr(one, name) != getattr(two, name):
                return f"{name} {getattr(one, name)!r} != {getattr(two, name)!r}"
        try:
            assert len(one.logprobs) == len(two.logprobs), "number of logprobs"
            assert_close(one.logprobs, two.logprobs)
            assert (one.cumulative is None) == (two.cumulative is None), "cumulative logprob"
            if one.cumulative is not None and two.cumulative is not None:
                assert abs(one.cumulative - two.cumulative) < 1e-2, "cumulative logprob"
        except AssertionError as error:
            return f"logprobs: {error}"
    try:
        assert_close(plain.prompt_logprobs, got.prompt_logprobs)
    except AssertionError as error:
        return f"prompt logprobs: {error}"
    return ""


def _tokens(one: Said, two: Said) -> str:
    pairs = zip(one.tokens, two.tokens, strict=False)
    shorter = min(len(one.tokens), len(two.tokens))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return (
        f"tokens from {place} on: {one.tokens[place : place + 6]} != "
        f"{two.tokens[place : place + 6]} (lengths {len(one.tokens)}, {len(two.tokens)}; "
        f"{one.finish_reason}, {two.finish_reason})"
    )


def _unsteady(
    models: Models, case: EngineCase, requests: Sequence[RequestCase], plain: dict[int, Answer]
) -> list[int]:
    """Requests whose plain vLLM output also varies: when run alone, or with other rounding."""
    found = set()
    whole = [replace(request, abort_after=None) for request in requests]
    with plain_engine(models, case) as llm:

        def again(some: Sequence[RequestCase]) -> None:
            answers = drive(llm, models, case, some, at_once=True)
            found.update(r.seed for r in some if difference(r, plain[r.seed], answers[r.seed]))

        for request in whole[:20]:
            again([request])
        for seed in range(3):
            with jittered(5e-5, seed):
                again([request for request in whole if request.seed not in found])
    return sorted(found)
