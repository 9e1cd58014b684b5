"""Both engines' steps on the demo's prompts: times, texts and figures, saved as a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_medusa.files import read_json, write_json
from vllm_medusa.offline.batch import AcceptanceCounts

FORMAT = "vllm-medusa demo 1"


@dataclass(frozen=True)
class Span:
    """A piece of the answer; ``drafted``: its tokens were drafted and accepted."""

    text: str
    drafted: bool


@dataclass(frozen=True)
class Step:
    """An engine step: seconds since the request was made, and the texts of its tokens.

    The last token of a step is the target's own; those before it were drafted and accepted.
    """

    at: float
    pieces: tuple[str, ...]

    @property
    def spans(self) -> Iterator[Span]:
        """Its drafted tokens, then the target's own."""
        if len(self.pieces) > 1:
            yield Span("".join(self.pieces[:-1]), True)
        yield Span(self.pieces[-1], False)


@dataclass(frozen=True)
class Take:
    """One engine's answer to one prompt."""

    steps: tuple[Step, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None

    @property
    def seconds(self) -> float:
        """From the request to the last token, prefill included."""
        return self.steps[-1].at

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Accepted draft tokens of its steps."""
        return AcceptanceCounts.of([len(step.pieces) for step in self.steps])

    def done(self, clock: float) -> list[Step]:
        """The steps that had ended ``clock`` seconds after the request."""
        return [step for step in self.steps if step.at <= clock]

    def tokens_per_second(self, clock: float) -> float:
        """Speed until ``clock`` or the end, prefill included; 0 before the first token."""
        tokens = sum(len(step.pieces) for step in self.done(clock))
        spent = min(clock, self.seconds)
        return tokens / spent if tokens and spent > 0 else 0.0

    def status(self, clock: float) -> str:
        """A line with the elapsed time, which stops at the end, the tokens and the speed."""
        tokens = sum(len(step.pieces) for step in self.done(clock))
        end = ", done" if clock >= self.seconds else ""
        return (
            f"{min(clock, self.seconds):.1f} s, {tokens} tokens, "
            f"{self.tokens_per_second(clock):.0f} tokens/s{end}"
        )


def joined(steps: Iterable[Step]) -> list[Span]:
    """The text of steps; adjacent spans of one kind are joined."""
    spans = (span for step in steps for span in step.spans)
    grouped = groupby(spans, key=lambda span: span.drafted)
    return [Span("".join(span.text for span in group), drafted) for drafted, group in grouped]


@dataclass(frozen=True)
class Run:
    """A prompt answered at one temperature by plain vLLM and with drafts."""

    name: str
    prompt: str
    temperature: float
    plain: Take
    drafted: Take

    @property
    def identical(self) -> bool:
        """Whether all tokens and the finish reason agree."""
        both = (self.plain, self.drafted)
        return len({(take.token_ids, take.finish_reason) for take in both}) == 1

    @property
    def seconds(self) -> float:
        """Time until both answers are complete, if both engines started at the same time."""
        return max(self.plain.seconds, self.drafted.seconds)

    @property
    def outcome(self) -> str:
        """The ratio of speeds, or where the tokens differ."""
        ratio = f"{self.plain.seconds / self.drafted.seconds:.2f}x the speed"
        if self.identical:
            return f"{ratio}, the same {len(self.plain.token_ids)} tokens"
        return f"DIFFERENT from token {self.first_difference} on"

    @property
    def first_difference(self) -> int:
        """The position of the first different token, or the shorter answer's length."""
        pairs = zip(self.plain.token_ids, self.drafted.token_ids, strict=False)
        different = (i for i, (a, b) in enumerate(pairs) if a != b)
        shorter = min(len(self.plain.token_ids), len(self.drafted.token_ids))
        return next(different, shorter)


@dataclass(frozen=True)
class Figures:
    """Figures of all prompts at one temperature."""

    temperature: float
    plain_speed: float  # tokens per second, prefill included
    drafted_speed: float
    tau: float | None  # tokens per verification step
    plain_steps: int
    drafted_steps: int
    identical: int
    requests: int

    @property
    def ratio(self) -> float:
        """Speedup from drafting."""
        return self.drafted_speed / self.plain_speed


@dataclass(frozen=True)
class Recording:
    """All runs, and the machine they ran on."""

    target: str
    drafter: str
    machine: str
    runs: tuple[Run, ...]

    def figures(self) -> list[Figures]:
        """One row per temperature, in order."""
        temperatures = dict.fromkeys(run.temperature for run in self.runs)
        return [_figures(t, [r for r in self.runs if r.temperature == t]) for t in temperatures]

    def shown(self, count: int) -> list[Run]:
        """Runs to show: the first ``count`` prompts, alternating between temperatures."""
        temperatures = [row.temperature for row in self.figures()]
        names = list(dict.fromkeys(run.name for run in self.runs))[:count]
        wanted = {(name, temperatures[i % len(temperatures)]) for i, name in enumerate(names)}
        return [
            run
            for name in names
            for run in self.runs
            if run.name == name and (name, run.temperature) in wanted
        ]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_json(path, {"format": FORMAT} | asdict(self))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote. Raises OSError, ValueError: unreadable, or not a recording."""
        document = read_json(path)
        if document.pop("format", None) != FORMAT:
            raise ValueError(
                f"{path} is not a recording of this demo. Pass a file written by --json."
            )
        runs = tuple(
            Run(**run | {side: _take(run[side]) for side in ("plain", "drafted")})
            for run in document.pop("runs")
        )
        return cls(**document, runs=runs)


def _take(document: dict[str, Any]) -> Take:
    steps = tuple(Step(step["at"], tuple(step["pieces"])) for step in document["steps"])
    return Take(steps, tuple(document["token_ids"]), document["finish_reason"])


def _figures(temperature: float, runs: Sequence[Run]) -> Figures:
    def speed(takes: list[Take]) -> float:
        return sum(len(take.token_ids) for take in takes) / sum(take.seconds for take in takes)

    plain, drafted = [run.plain for run in runs], [run.drafted for run in runs]
    total = AcceptanceCounts.summed(take.acceptance for take in drafted)
    return Figures(
        temperature,
        speed(plain),
        speed(drafted),
        total.tau,
        AcceptanceCounts.summed(take.acceptance for take in plain).steps,
        total.steps,
        sum(run.identical for run in runs),
        len(runs),
    )
