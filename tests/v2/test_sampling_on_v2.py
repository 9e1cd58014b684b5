"""Sampling, requests and V2's own parts, on vLLM's V2 model runner.

No refusals: they happen before a runner is built, with the same messages for both runners.
"""

from __future__ import annotations

from support.pytest_process import MARKS_ON_V2, run_on_v2

pytestmark = MARKS_ON_V2


def test_on_v2() -> None:
    run_on_v2(
        "tests/v2/test_runner.py",
        "tests/v2/test_dynamic_trees.py",
        "tests/v2/test_eagle.py",
        "tests/e2e/test_eagle.py::test_exact_in_mixed_steps",
        "tests/e2e/test_eagle_layouts.py::test_exact[window]",
        "tests/e2e/test_eagle_layouts.py::test_exact[P-EAGLE]",
        "tests/e2e/test_mtp.py::test_exact_in_mixed_steps",
        "tests/e2e/test_mtp.py::test_negative_controls[positions_of_slots]",
        "tests/e2e/test_sampling.py::test_all_kinds_in_one_batch",
        "tests/e2e/test_sampling.py::test_bad_words",
        "tests/e2e/test_adapters.py::test_eagle",
        "tests/e2e/test_adapters.py::test_adapters_in_one_batch",
        "tests/e2e/test_noise.py::test_more_drafts_are_accepted",
        "tests/e2e/test_noise.py::test_other_noise_loses_the_gain_and_no_token",
        "tests/e2e/test_typical.py::test_equals_the_oracle",
        "tests/e2e/test_requests.py::test_a_request_limits_its_drafts",
        "tests/e2e/test_refusals.py::test_a_layer_with_its_own_backend_starts_no_engine",
    )
