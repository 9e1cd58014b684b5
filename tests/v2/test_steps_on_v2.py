"""Equality, architectures, scheduling and ranks again, on vLLM's V2 model runner."""

from __future__ import annotations

from support.pytest_process import MARKS_ON_V2, run_on_v2

pytestmark = MARKS_ON_V2


def test_on_v2() -> None:
    run_on_v2(
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
    )
