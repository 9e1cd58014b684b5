"""Imported first by Python in every process that a test starts: `conftest` sets the path.

None of the million objects created by vLLM's imports is garbage, and collecting during the
imports takes a sixth of their time.
"""

import gc

gc.set_threshold(50_000, 20, 20)
