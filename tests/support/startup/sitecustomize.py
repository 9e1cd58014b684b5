"""Imported first by Python in every process that a test starts: `conftest` sets the path.

None of the million objects created by vLLM's imports is garbage, and collecting during the
imports takes a sixth of their time. An engine then collects about ten times, which takes two
seconds: the first time, everything imported is excluded.
"""

import atexit
import functools
import gc
import sys

gc.set_threshold(50_000, 20, 20)
_collect = gc.collect


@functools.wraps(_collect)
def _collect_without_imports(generation: int = 2) -> int:
    if "vllm.v1.worker.worker_base" in sys.modules:
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise nanobind reports what is not freed as leaks
        gc.freeze = gc.unfreeze = lambda: None  # vLLM thaws everything at an engine's end
        gc.collect = _collect
    return _collect(generation)


gc.collect = _collect_without_imports
