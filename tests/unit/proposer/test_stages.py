"""Deep heads run only when needed: the same drafts if so, fewer heads otherwise."""

import torch

from vllm_medusa.proposer.choices import Choices
from vllm_medusa.proposer.steps import FIRST_HEADS as FIRST
from vllm_medusa.proposer.steps import MIN_SURVIVAL, Stages

BATCH, HEADS, WIDTH = 3, 5, 4
DEEP = torch.full((BATCH,), HEADS)


class Heads:
    """Heads whose best choices of a request have the given confidence."""

    def __init__(self, *confident: float) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = BATCH, HEADS, WIDTH
        first = torch.tensor(confident).view(BATCH, 1, 1).expand(BATCH, HEADS, 1)
        confidence = torch.cat([first, first * torch.linspace(0.3, 0.1, WIDTH - 1)], 2)
        self.token_ids = torch.randint(0, 99, shape, generator=generator)
        self.whole = Choices(self.token_ids, confidence.log())
        self.calls: list[tuple[int, int]] = []

    def ask(self, end: int, width: int, first: int) -> Choices:
        assert width == WIDTH
        self.calls.append((first, end))
        return Choices(self.token_ids[:, first:end], self.whole.log_confidence[:, first:end])

    def run(self, stages: Stages, useful: torch.Tensor = DEEP) -> Choices:
        self.calls.clear()
        return stages.choices(self.ask, HEADS, WIDTH, useful, MIN_SURVIVAL)


def test_deep_heads_run_if_a_request_is_confident():
    """The most confident request with a useful depth decides, by its two best confidences."""
    unsure, confident = Heads(0.3, 0.2, 0.1), Heads(0.3, 0.6, 0.1)
    stages = Stages(own=3, again=1)
    found = unsure.run(stages)
    assert unsure.calls == [(0, FIRST)]
    assert torch.equal(found.token_ids, unsure.token_ids[:, :FIRST])
    found = confident.run(stages)
    assert confident.calls == [(0, FIRST), (FIRST, HEADS)]
    assert torch.equal(found.token_ids, confident.token_ids)
    assert torch.equal(found.log_confidence, confident.whole.log_confidence)
    confident.run(stages, torch.tensor([HEADS, FIRST, HEADS]))  # the confident one is about to end
    assert confident.calls == [(0, FIRST)]
    assert stages.choices(confident.ask, 1, WIDTH, DEEP, MIN_SURVIVAL).token_ids.shape[1] == 1


def test_a_single_run_if_deep_heads_are_often_needed():
    """Running all heads at once saves a second read; unlikely drafts restore two runs."""
    confident, unsure = Heads(0.9, 0.1, 0.1), Heads(0.1, 0.1, 0.1)
    small_head, own_head = Stages(own=3, again=9), Stages(own=3, again=0)
    for _ in range(100):
        for stages in (small_head, own_head):
            found = confident.run(stages)
            assert torch.equal(found.token_ids, confident.token_ids)
    confident.run(small_head)
    assert confident.calls == [(0, HEADS)]
    confident.run(own_head)
    assert confident.calls == [(0, FIRST), (FIRST, HEADS)]  # no head is read twice
    unsure.run(small_head)
    assert unsure.calls == [(0, HEADS)]
    for _ in range(100):
        unsure.run(small_head)
    assert unsure.calls == [(0, FIRST)]
