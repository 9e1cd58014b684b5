"""Are an arm's tokens plain vLLM's? No speed is reported where they are not.

In fp32 they must be equal. In bf16 a forward pass over several rows rounds otherwise than one over
a single row, so two tokens that the target finds almost equally good can change places; from there
on the texts differ and nothing more can be compared. Such a first difference passes if it is a
near-tie: with a seeded request, a shift of the two tokens' logits by no more than `NEAR_TIE` would
have changed the draw, with the very random numbers that plain vLLM used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm_medusa.sampler import draw_splitmix

# bf16 has 8 bits of precision: logits from 8 to 16 are 1/16 apart. Two of them, each two steps off
# after all the layers' own rounding, differ by up to 4/16 from what they should.
NEAR_TIE = 0.25

Score = Callable[[list[list[int]]], list[float]]  # rows -> log p of each row's last id at T = 1


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt's output that is not plain vLLM's."""

    prompt: int
    position: int
    plain_token: int | None  # None: the output had ended
    arm_token: int | None
    gap: float  # logits, before the temperature; infinite when one output just stopped

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= NEAR_TIE


@dataclass(frozen=True)
class Gate:
    """The outcome of a comparison."""

    prompts: int
    differences: tuple[Difference, ...]
    checked: bool = True  # False: the arm draws other random numbers by design

    @property
    def green(self) -> bool:
        """Whether the arm's speed may be reported."""
        return all(difference.near_tie for difference in self.differences)

    def __str__(self) -> str:
        if not self.checked:
            return "not comparable"
        if not self.differences:
            return f"{self.prompts}/{self.prompts} identical"
        same = self.prompts - len(self.differences)
        worst = max(difference.gap for difference in self.differences)
        kind = "near-ties" if self.green else "DIFFERENT"
        return f"{same}/{self.prompts} identical, rest {kind} (gap up to {worst:.3f})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"checked": self.checked, "green": self.green, "text": str(self)} | {
            "prompts": self.prompts,
            "differences": [asdict(d) | {"near_tie": d.near_tie} for d in self.differences],
        }


def compare(
    prompts: Sequence[list[int]],
    plain: Sequence[list[int]],
    arm: Sequence[list[int]],
    temperature: float,
    vocab_size: int,
    score: Score,
) -> Gate:
    """Compares outputs token by token; prompt i was sampled with seed i (greedy: none).

    Args:
        prompts: ids of each prompt.
        plain: new ids by plain vLLM.
        arm: new ids by the arm.
        temperature: 0 for greedy.
        vocab_size: V of the logits that were sampled from.
        score: plain vLLM's log-probabilities.

    """
    differences = []
    for index, (prompt, want, got) in enumerate(zip(prompts, plain, arm, strict=True)):
        if want == got:
            continue
        shared = min(len(want), len(got))
        position = next((t for t in range(shared) if want[t] != got[t]), shared)
        if position == shared:  # one is a prefix of the other
            ended = [ids[position] if position < len(ids) else None for ids in (want, got)]
            differences.append(Difference(index, position, ended[0], ended[1], float("inf")))
            continue
        a, b = want[position], got[position]
        context = prompt + want[:position]
        log_a, log_b = score([[*context, a], [*context, b]])
        seed = index if temperature > 0 else None
        gap = flip_gap(a, b, log_a, log_b, temperature, seed, position, vocab_size)
        differences.append(Difference(index, position, a, b, gap))
    return Gate(len(prompts), tuple(differences))


def flip_gap(
    a: int,
    b: int,
    log_a: float,
    log_b: float,
    temperature: float,
    seed: int | None,
    position: int,
    vocab_size: int,
) -> float:
    """How far b's logit must rise over a's until b is chosen instead of a; 0 if it already is.

    For a seeded sample the choice is repeated with the noise of draw `position` of the request's
    generator, which advances once per token.
    """
    if seed is None:
        return max(0.0, log_a - log_b)

    def picks_b(shift: float) -> bool:
        logits = torch.full((vocab_size,), -torch.inf)
        logits[a], logits[b] = log_a / temperature, (log_b + shift) / temperature
        generator = torch.Generator().manual_seed(seed)
        torch.randint(0, 2**31, (position,), generator=generator)
        return int(draw_splitmix(logits, generator)) == b

    low, high = 0.0, 64.0
    if picks_b(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if picks_b(middle) else (middle, high)
    return high
