"""The trial runs the real training on the test target, for every kind of heads."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.assets import TARGET as TARGET_OF_TESTS
from support.told import Told

from vllm_medusa.adapt.amounts import Rates
from vllm_medusa.adapt.options import AdaptFiles, AdaptOptions, TrainingOptions, training_of
from vllm_medusa.adapt.trial import RATES, TrialOptions, try_machine
from vllm_medusa.files import read_json

TARGET = Path(TARGET_OF_TESTS)


@pytest.mark.parametrize("drafter", ["medusa", "hydra", "eagle3"])
def test_rates_of_a_few_steps(tmp_path: Path, drafter: str) -> None:
    files = AdaptFiles(prompts=Path("prompts.jsonl"), output=tmp_path / "heads")
    own = TrainingOptions(drafter=drafter, num_heads=2)
    training = training_of(AdaptOptions(target=str(TARGET), files=files, training=own))
    training = replace(training, files=replace(training.files, output=tmp_path / "heads"))
    told = Told()
    for _ in range(2):  # again, as after a kill
        try_machine(TrialOptions(training=training, batch=4, rows=128), told)
    rates = Rates(**read_json(tmp_path / RATES))
    assert rates.batch == 4
    assert min(rates.prefill, rates.step, rates.training) > 0
    assert not (tmp_path / "heads").exists()
    assert {count[0] for count in told.counts} <= {"trial, hidden states", "trial, training"}
