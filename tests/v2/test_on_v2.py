"""The engine tests again on vLLM's V2 model runner, in one process, and V2's own parts.

No refusals: they happen before a runner is built, with the same messages for both runners.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from support.pytest_process import REPOSITORY, run_pytest


@pytest.mark.engine
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_on_v2() -> None:
    path = [str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    run_pytest(
        *("-p", "support.triton_on_cpu", "--timeout", "900"),
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
        "tests/integration/test_triton_engine.py",
        "tests/e2e/test_equality.py::test_planted_drafts",
        "tests/e2e/test_equality.py::test_random_heads",
        "tests/e2e/test_equality.py::test_each_control_differs",
        "tests/e2e/test_architectures.py::test_equality",
        "tests/e2e/test_decode_agreement.py::test_accepts_what_the_oracle_accepts",
        "tests/e2e/test_decode_agreement.py::test_hidden_state_of_the_wrong_node",
        "tests/e2e/test_dynamic_trees.py::test_accepts_what_the_oracle_accepts",
        "tests/e2e/test_scheduling.py::test_chunked_prefill_and_mixed_steps",
        "tests/e2e/test_scheduling.py::test_trees_are_truncated_to_the_budget",
        "tests/e2e/test_scheduling.py::test_prefix_cache_hits_on_compacted_blocks",
        "tests/e2e/test_scheduling.py::test_requests_end_exactly_at_max_model_len",
        "tests/e2e/test_scheduling.py::test_arrivals_and_aborts",
        "tests/distributed/test_tensor_parallel.py::test_greedy_tokens",
        "tests/distributed/test_tensor_parallel.py::test_seeded_tokens",
        "tests/distributed/test_tensor_parallel.py::test_the_ranks_agree",
        "tests/distributed/test_tensor_parallel.py::test_the_comparison_covers_many_verdicts",
        environment={"PYTHONPATH": os.pathsep.join(path)},
    )
