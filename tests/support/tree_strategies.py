"""`random_trees.make_case` as a Hypothesis strategy; Hypothesis may be missing on a GPU machine."""

from hypothesis import strategies as st

from support.random_trees import make_case

# Few tokens, so that siblings often have equal tokens and paths get long.
cases = st.builds(
    make_case,
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    max_nodes=st.integers(1, 14),
    vocab=st.integers(1, 3),
    deep=st.booleans(),
)
