r"""What typical acceptance gives and takes: tokens per step against what becomes of the text.

    python -m benchmarks typical tests/assets/target tests/assets/heads \
        --json benchmarks/results/typical.json

Plain vLLM, lossless and typical acceptance answer the same prompts with the same seeds. Of the
answers: the mean log-probability of a token under the target at temperature 1; how many 4-grams
stood in the same answer before; how many 2-grams of an answer are different ones. Of the first two
tokens of short prompts, drawn again and again: the total-variation distance from the target's own
distribution, over the likeliest pairs and all others together; what plain vLLM has there is the
noise of so many draws. Lossless answers have to be plain's, and so have typical ones at temperature
0. All but the ratio of the times (--timed) depends on the seeds alone: no quiet machine is needed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arms import PLAIN, ArmOptions, dynamic_arm, engine
from benchmarks.case import Case, Row
from vllm_medusa.job import Progress
from vllm_medusa.offline.acceptance import Acceptance
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.engine import Sampling
from vllm_medusa.offline.process import EngineProcess
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.options import Above, Dtype, Positive, option

SEED = 0
_GREEDY = 8  # prompts that are answered at temperature 0 as well
DELTA = 0.3  # the paper's, beside the square root of epsilon
Found = tuple[list[Result], float]  # seconds


class TypicalOptions(ArmOptions):
    """What is measured."""

    nodes: Positive = option("draft nodes of a request", default=7)
    epsilons: tuple[Above, ...] = option(default=(0.01, 0.04, 0.09, 0.25))
    temperatures: tuple[Above, ...] = option(default=(0.3, 0.6, 0.9, 1.2))
    prompts: Positive = option("so many of them, again from the first", default=32)
    max_tokens: Positive = option("of each answer", default=64)
    draws: Positive = option("of the first tokens, for each short prompt", default=256)
    pairs: Positive = option("likeliest pairs of tokens that count for themselves", default=31)
    contexts: Positive = option("short prompts", default=4)
    batch: tuple[Positive, ...] = option("requests at a time", default=(64,))
    minutes: Above = option("what is not measured by then is left out", default=6.0)
    timed: bool = option(
        "tokens a second against plain vLLM's too: on a quiet machine, with a large target",
        default=False,
    )
    dtype: Dtype = option(default="float32")


@dataclass(frozen=True)
class Accepting(Sampling):
    """Sampling parameters of requests that say how their drafts are accepted."""

    extra_args: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Kind:
    """A way to sample."""

    name: str
    accept: Mapping[str, Any] | None = None  # None: plain vLLM
    epsilon: float | None = None
    delta: float | None = None

    def sampling(self, temperature: float, max_tokens: int) -> Sampling:
        """Of its requests."""
        if self.accept is None:
            return Sampling(max_tokens=max_tokens, temperature=temperature)
        more = {"medusa": dict(self.accept)}
        return Accepting(max_tokens=max_tokens, temperature=temperature, extra_args=more)


def kinds(epsilons: Sequence[float]) -> list[Kind]:
    """Plain, lossless, and typical with both deltas of each epsilon."""
    found = [Kind("plain"), Kind("lossless", {"acceptance": "lossless"})]
    for epsilon in epsilons:
        for delta in dict.fromkeys((DELTA, round(math.sqrt(epsilon), 6))):
            accept = {"acceptance": "typical", "epsilon": epsilon, "delta": delta}
            found.append(Kind("typical", accept, epsilon, delta))
    return found


def run(options: TypicalOptions, progress: Progress) -> Iterator[Row]:
    """A row for each way to sample and temperature."""
    end = time.monotonic() + 60 * options.minutes
    prompts, batch = options.read_prompts(), options.batch[0]
    judge = Judge(options, prompts)
    plain: dict[float, Found] = {}
    exact: dict[float, bool] = {}
    hottest = max(options.temperatures)
    with (
        engine(PLAIN, options, hottest) as without,
        engine(dynamic_arm(options, options.nodes), options, hottest) as ours,
    ):

        def answers(kind: Kind, temperature: float, of: Sequence[Prompt], tokens: int) -> Found:
            process: EngineProcess = without if kind.accept is None else ours
            process.sampling = kind.sampling(temperature, tokens)
            results, seconds = process.run(of, batch, SEED if temperature > 0 else None)
            return sorted(results, key=lambda result: result.prompt.index), seconds

        every = kinds(options.epsilons)
        greedy = [answers(kind, 0.0, prompts[:_GREEDY], options.max_tokens)[0] for kind in every]
        wrong = [
            kind for kind, found in zip(every, greedy, strict=True) if differ(found, greedy[0])
        ]
        for kind in every:
            for temperature in options.temperatures:
                what: dict[str, Any] = {"name": f"{kind.name}, T {temperature:g}"}
                what |= {"arm": kind.name, "temperature": temperature}
                what |= {"epsilon": kind.epsilon, "delta": kind.delta} if kind.epsilon else {}
                if time.monotonic() > end:
                    yield Row(what, note="left out: the time was up")
                    continue
                found = answers(kind, temperature, prompts, options.max_tokens)
                plain.setdefault(temperature, found)
                equal = not differ(found[0], plain[temperature][0])
                if kind.name == "lossless":
                    exact[temperature] = equal
                drawn = answers(kind, temperature, judge.contexts, 4)[0]
                numbers = judge.text(found[0]) | {"distance": judge.distance(drawn, temperature)}
                if options.timed:
                    numbers["ratio"] = speed(found) / speed(plain[temperature])
                right = exact.get(temperature, True) and kind not in wrong
                reason = "tokens differ from plain vLLM's where they may not"
                yield Row(what, numbers, right=right, failed="" if right else reason)


def differ(some: Sequence[Result], others: Sequence[Result]) -> bool:
    """Whether any answer has other tokens."""
    pairs = zip(some, others, strict=True)
    return any(a.answers[0].token_ids != b.answers[0].token_ids for a, b in pairs)


def speed(found: Found) -> float:
    """Tokens a second."""
    return sum(result.num_tokens for result in found[0]) / found[1]


class Judge:
    """What the target itself, in transformers, says of texts."""

    def __init__(self, options: TypicalOptions, prompts: Sequence[Prompt]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(
            options.target, dtype=torch.float32
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.target)
        self.ids = [tokenizer.encode(str(prompt.text)) for prompt in prompts]
        short = sorted(range(len(prompts)), key=lambda index: (len(self.ids[index]), index))
        distinct = list({tuple(self.ids[index]): index for index in reversed(short)}.values())[::-1]
        self.chosen = distinct[: options.contexts]
        self.contexts = [
            replace(prompts[each], index=place * options.draws + draw)
            for place, each in enumerate(self.chosen)
            for draw in range(options.draws)
        ]
        self.draws, self.pairs = options.draws, options.pairs
        self._two = [self._logits_of_two(self.ids[each]) for each in self.chosen]

    @torch.inference_mode()
    def text(self, results: Sequence[Result]) -> dict[str, Any]:
        """What answers are like."""
        total = Acceptance.total(result.acceptance for result in results)
        tokens = [result.answers[0].token_ids for result in results]
        log_p, count = 0.0, 0
        for ids, answer in zip(self.ids, tokens, strict=True):
            logits = self.model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1))
            log_p, count = log_p + float(chosen.sum()), count + len(answer)
        return {
            "tau": total.tau if total.accepted else 1.0,
            "steps": total.steps,
            "log_p": log_p / count,
            "repeated": mean(1 - distinct(answer, 4) for answer in tokens),
            "distinct": mean(distinct(answer, 2) for answer in tokens),
        }

    def distance(self, results: Sequence[Result], temperature: float) -> float:
        """Total variation between the first two tokens and the target's, a mean over contexts."""
        found = []
        for place, two in enumerate(self._two):
            drawn = results[place * self.draws : (place + 1) * self.draws]
            seen = Counter(tuple(result.answers[0].token_ids[:2]) for result in drawn)
            found.append(variation(seen, likeliest(*two, temperature, self.pairs)))
        return mean(found)

    @torch.inference_mode()
    def _logits_of_two(self, ids: list[int], width: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the first token, [V]; its likeliest ones, [W]; logits after each, [W, V]."""
        done = self.model(torch.tensor([ids]), use_cache=True)
        first = done.logits[0, -1]
        tokens = first.topk(min(width, len(first))).indices
        done.past_key_values.batch_repeat_interleave(len(tokens))
        second = self.model(tokens.unsqueeze(1), past_key_values=done.past_key_values).logits[:, -1]
        return first, tokens, second


def likeliest(
    first: Tensor, tokens: Tensor, second: Tensor, temperature: float, count: int
) -> dict[tuple[int, ...], float]:
    """The likeliest pairs of tokens and their probabilities; see `Judge._logits_of_two`."""
    p = (first / temperature).softmax(-1)[tokens].unsqueeze(1)  # [W, 1]
    joint = p * (second / temperature).softmax(-1)  # [W, V]
    best = joint.flatten().topk(count)
    rows, columns = best.indices // joint.shape[1], best.indices % joint.shape[1]
    names = zip(tokens[rows].tolist(), columns.tolist(), strict=True)
    return dict(zip(names, best.values.tolist(), strict=True))


def variation(seen: Counter[tuple[int, ...]], wanted: Mapping[tuple[int, ...], float]) -> float:
    """Total variation over the wanted outcomes and all others together."""
    total = seen.total()
    others = 1 - sum(seen[each] for each in wanted) / total, 1 - sum(wanted.values())
    apart = sum(abs(seen[each] / total - p) for each, p in wanted.items())
    return (apart + abs(others[0] - others[1])) / 2


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of a text's n-grams that are different ones."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean(values: Any) -> float:
    """Of any number of values."""
    found = list(values)
    return sum(found) / len(found)


SHOWN = {"distance": "total variation", "log_p": "mean log p", "repeated": "repeated 4-grams"}


def on_line(row: Mapping[str, Any], rooted: bool) -> bool:
    """Whether its delta is the square root of epsilon, or the paper's; at 0.09 it is both."""
    return math.isclose(row["delta"], math.sqrt(row["epsilon"]) if rooted else DELTA, rel_tol=1e-4)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """What becomes of the text against tokens per step, a line for each temperature and delta."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if "tau" in row]
    temperatures = sorted({row["temperature"] for row in shown})
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(5 * len(SHOWN), 4.5))
    for number, temperature in enumerate(temperatures):
        own = [row for row in shown if row["temperature"] == temperature]
        for panel, key in zip(panels, SHOWN, strict=True):
            for arm, mark in (("plain", "o"), ("lossless", "s")):
                here = [row for row in own if row["arm"] == arm]
                panel.plot(
                    [row["tau"] for row in here], [row[key] for row in here], mark,
                    color=f"C{number}", mfc="none",
                )  # fmt: skip
            for rooted, style in ((False, "-"), (True, "--")):
                here = [row for row in own if row["arm"] == "typical" and on_line(row, rooted)]
                here.sort(key=lambda row: -row["epsilon"])
                label = f"T {temperature:g}" + (", delta = sqrt(epsilon)" if rooted else "")
                panel.plot(
                    [row["tau"] for row in here], [row[key] for row in here], style,
                    color=f"C{number}", marker=".", label=label,
                )  # fmt: skip
    for panel, title in zip(panels, SHOWN.values(), strict=True):
        panel.set(xlabel="tokens per step", ylabel=title)
        panel.grid(alpha=0.3)
    panels[0].set_title("o plain, square lossless, lines: epsilon falls to the right", fontsize=9)
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


CASE = Case(
    TypicalOptions,
    run,
    {
        "arm": ("acceptance", ""),
        "temperature": ("T", "g"),
        "epsilon": ("epsilon", "g"),
        "delta": ("delta", ".3g"),
        "tau": ("tau", ".3f"),
        "steps": ("steps", "d"),
        "log_p": ("mean log p", ".3f"),
        "repeated": ("repeated 4-grams", ".3f"),
        "distinct": ("distinct 2-grams", ".3f"),
        "distance": ("total variation", ".3f"),
        "ratio": ("tokens/s to plain", ".2f"),
    },
    quick={
        "prompts": 8, "max_tokens": 24, "draws": 64, "temperatures": (0.9,), "epsilons": (0.09,)
    },
    picture=picture,
)  # fmt: skip
