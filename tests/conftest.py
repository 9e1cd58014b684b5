"""Settings that vLLM reads when it is first imported, and models shared by many tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run in this process, for inspection
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a busy machine, two threads wait for each other
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if "VLLM_CACHE_ROOT" not in os.environ:  # otherwise tests' step costs would be stored
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="vllm-medusa-tests-")
    atexit.register(shutil.rmtree, os.environ["VLLM_CACHE_ROOT"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network or waits for it
STARTUP = str(Path(__file__).parent / "support" / "startup")
if STARTUP not in sys.path:  # otherwise this process and its children already have it
    path = [STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    gc.set_threshold(50_000, 20, 20)
gc.collect = getattr(gc.collect, "__wrapped__", gc.collect)  # here, `support.engines` freezes
# Some thirty processes import vLLM, which takes nine seconds longer without compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


with suppress(ImportError):  # a machine with a GPU may only have pytest
    from hypothesis import HealthCheck, settings

    # Times are meaningless on a busy machine.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


# The longest files first, so that no xdist worker is left waiting at the end.
ORDER = (
    *("v2", "distributed", "e2e", "integration", "gpu"),
    *("unit/scorer", "unit/cli", "unit/sampler", "unit/test_"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.removeprefix("tests/")
        return next((i for i, start in enumerate(ORDER) if file.startswith(start)), len(ORDER))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Not earlier: a test file may have to add a backend before Triton is imported."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.interpreter import speed_up

        speed_up()


@pytest.fixture(scope="session")
def chaotic_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama that never loops; `support.models.STOPS` end its outputs."""
    from support.models import STOPS, save_model

    return save_model(tmp_path_factory.mktemp("llama"), "Llama", eos_token_id=list(STOPS))


@pytest.fixture(scope="session")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four heads for `chaotic_llama` that predict nothing."""
    from support.models import save_random_heads

    return save_random_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="session")
def eagle_case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`support.eagle_runs.Case`, trained once."""
    from support.eagle_runs import make_case

    return make_case(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="session")
def fitted_case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`support.fitted_case.Fitted`, solved once."""
    from support.fitted_case import make_case

    return make_case(tmp_path_factory.mktemp("fitted"))
