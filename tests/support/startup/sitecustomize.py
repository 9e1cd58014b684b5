"""Python imports this first, in every process that a test starts: `conftest` names this folder.

Of the million objects that vLLM's imports make none is garbage, and looking for some takes a sixth
of the time that they take.
"""

import gc

gc.set_threshold(50_000, 20, 20)
