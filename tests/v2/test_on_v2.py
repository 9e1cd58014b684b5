"""The end-to-end tests once more, on vLLM's V2 model runner.

Not the refusals: they are said before a runner is built, in the same words for both.

They run in a process of their own, since Triton's interpreter has to be there before vLLM is
imported (`support.triton_on_cpu`). To run any test that way by hand:

    PYTHONPATH=tests python -m pytest -p support.triton_on_cpu tests/e2e/test_equality.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),  # the first test waits for the whole process
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

REPOSITORY = Path(__file__).parents[2]
# Two processes run at a time, about as long; a file's tests share an engine, so none is torn apart.
PARTS = [
    [
        "tests/e2e/test_equality.py::test_planted_drafts",
        "tests/e2e/test_equality.py::test_random_heads",
        "tests/e2e/test_negative_controls.py::test_nothing_broken_is_equal",
        "tests/e2e/test_negative_controls.py::test_broken_differs",
        "tests/e2e/test_architectures.py::test_equality",
        "tests/e2e/test_decode_agreement.py::test_accepts_what_the_oracle_accepts",
        "tests/e2e/test_decode_agreement.py::test_hidden_state_of_the_wrong_node",
        "tests/e2e/test_scheduling.py::test_chunked_prefill_and_mixed_steps",
        "tests/e2e/test_scheduling.py::test_trees_are_cut_to_the_budget",
        "tests/e2e/test_scheduling.py::test_prefix_cache_hits_on_compacted_blocks",
        "tests/e2e/test_scheduling.py::test_requests_end_exactly_at_max_model_len",
        "tests/e2e/test_scheduling.py::test_end_tokens_of_the_model",
        "tests/e2e/test_scheduling.py::test_stop_tokens",
        "tests/e2e/test_scheduling.py::test_arrivals_and_aborts",
        "tests/e2e/test_scheduling.py::test_preemption",
        "tests/e2e/test_scheduling.py::test_torch_compile",
        "tests/v2/test_same_as_v1.py",
        "tests/distributed/test_tensor_parallel.py::test_each_rank_scores_its_half",
        "tests/distributed/test_tensor_parallel.py::test_greedy_tokens",
        "tests/distributed/test_tensor_parallel.py::test_seeded_tokens",
        "tests/distributed/test_tensor_parallel.py::test_one_rank_decides_the_same",
        "tests/distributed/test_tensor_parallel.py::test_the_ranks_agree",
        "tests/distributed/test_tensor_parallel.py::test_the_comparison_is_a_large_one",
        "tests/distributed/test_tensor_parallel.py::test_a_rank_that_differs_is_noticed",
    ],
    [
        "tests/v2/test_seams.py",
        "tests/e2e/test_sampling.py::test_all_kinds_in_one_batch",
        "tests/e2e/test_sampling.py::test_bad_words",
        "tests/e2e/test_sampling.py::test_batch_invariance_of_a_seed",
        "tests/e2e/test_typical.py::test_equals_the_oracle",
        "tests/e2e/test_requests.py::test_a_bad_request_fails_alone",
        "tests/e2e/test_requests.py::test_good_options_are_no_error",
        "tests/e2e/test_requests.py::test_short_requests_beside_long_ones",
        "tests/e2e/test_refusals.py::test_a_layer_with_a_backend_of_its_own_starts_nothing",
    ],
]
SUITE = [selected for part in PARTS for selected in part]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Of every selected test: case -> what was wrong ("" if nothing was)."""
    folder = tmp_path_factory.mktemp("v2")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    with ThreadPoolExecutor() as threads:
        for report in threads.map(run_part, [folder / f"{i}.xml" for i in range(2)], PARTS):
            for case in ElementTree.parse(report).iter("testcase"):
                file = case.get("classname", "").replace(".", "/") + ".py"
                name = case.get("name", "")
                wrong = "\n".join(
                    f"{child.tag}: {child.text}" for child in case if child.tag != "system-out"
                )
                for selected in (file, f"{file}::{name.partition('[')[0]}"):
                    found[selected][name] = wrong
    return found


def run_part(report: Path, part: list[str]) -> Path:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.triton_on_cpu", "-p"]
    command += ["no:cacheprovider", "--timeout", "1800", f"--junitxml={report}", *part]
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if not report.exists():
        pytest.fail(f"pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    return report


@pytest.mark.parametrize("selected", SUITE)
def test_on_v2(outcomes: dict[str, dict[str, str]], selected: str) -> None:
    cases = outcomes[selected]
    assert cases, "nothing ran"
    wrong = [f"{name}: {text}" for name, text in cases.items() if text]
    assert not wrong, "\n\n".join(wrong)[-8000:]
