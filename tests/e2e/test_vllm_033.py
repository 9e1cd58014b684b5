"""vLLM 0.33's Python with trees, over the CPU kernels of the installed vLLM.

Only if its files are available (see `support.overlay`). Each test runs in a separate
session with the other vLLM first on the path: first our config code, then the end-to-end tests that
0.32 passes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.overlay import VARIABLE, build, pytest_command, python_files_of_033

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        python_files_of_033() is None,
        reason=f"{VARIABLE} does not point to the Python files of vLLM 0.33",
    ),
]

TESTS = Path(__file__).parent

CONFIG = """
import json, sys
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_medusa.worker.options import DRAFTER, is_for_v2, is_medusa

model, heads, runner = sys.argv[1:]
assert vllm.__version__.startswith("0.33."), vllm.__version__
assert current_platform.is_cpu()
ASKED = {"method": "medusa", "model": heads, "tree": {"dense": [2, 2]}}
COMMON = {"model": model, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}

def check(config):
    speculative = config.speculative_config
    assert is_medusa(speculative) and speculative.model == DRAFTER
    assert speculative.num_speculative_tokens == 6
    assert config.additional_config["medusa"]["heads"] == heads
    assert config.use_v2_model_runner == is_for_v2(speculative) == (runner == "v2")
    assert f"vllm_medusa.worker.{runner}.worker" in config.parallel_config.worker_cls
    assert config.model_config.max_model_len == 512

check(EngineArgs(**COMMON, speculative_config=dict(ASKED)).create_engine_config())

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
arguments = ["--model", model, "--skip-tokenizer-init", "--dtype", "float32",
             "--max-model-len", "512", "--speculative-model", heads,
             "--speculative-config", json.dumps({"tree": {"dense": [2, 2]}})]
check(EngineArgs.from_cli_args(parser.parse_args(arguments)).create_engine_config())
assert any(action.dest == "speculative_model" for action in parser._actions)

plain = EngineArgs(**COMMON, speculative_config={
    "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2})
assert plain.create_engine_config().speculative_config.method == "ngram"

def refusal(**changes):
    try:
        given = {**COMMON, "speculative_config": dict(ASKED), **changes}
        EngineArgs(**given).create_engine_config()
    except ValueError as error:
        return str(error)
    raise AssertionError(f"not refused: {changes}")

assert "pipeline_parallel_size is 2" in refusal(pipeline_parallel_size=2)
assert "LoRA" in refusal(enable_lora=True)
assert "'tre'" in refusal(speculative_config={**ASKED, "tre": []})
assert "7 nodes" in refusal(max_num_batched_tokens=6, max_num_seqs=2, max_model_len=6)
assert "'Medusa'" in refusal(speculative_config={**ASKED, "method": "Medusa"})

from vllm_medusa import plugin
plugin.installed_vllm = lambda: ("vllm", "0.34.0")
assert "vllm 0.34.0" in refusal()
print("all checked")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    files = python_files_of_033()
    assert files is not None
    return build(files, tmp_path_factory.mktemp("vllm033"))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_config(
    environment: dict[str, str], chaotic_llama: str, random_heads: str, runner: str
) -> None:
    start = "import support.triton_on_cpu\n" if runner == "v2" else ""
    command = [sys.executable, "-c", start + CONFIG, chaotic_llama, random_heads, runner]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("all checked\n")


def run(environment: dict[str, str], *arguments: str) -> None:
    """Run end-to-end tests on 0.33; none may fail or be skipped."""
    done = subprocess.run(
        pytest_command(*arguments),
        env=environment,
        capture_output=True,
        text=True,
        cwd=TESTS.parents[1],
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, summary


@pytest.mark.parametrize(
    ("file", "selection"),
    [
        ("test_equality.py", "8_nodes or 14_nodes or trained or reference"),
        ("test_refusals.py", ""),
        ("test_requests.py", ""),
        ("test_serve.py", ""),
        ("../worker/test_seams.py", ""),
    ],
)
def test_the_v1_runner(environment: dict[str, str], file: str, selection: str) -> None:
    if file == "test_serve.py":
        pytest.importorskip("orjson", reason="0.33's server needs orjson, which 0.32's does not")
    run(environment, str(TESTS / file), "-k", selection)


def test_the_v2_runner(environment: dict[str, str]) -> None:
    pytest.importorskip("triton", reason="the V2 runner needs Triton, at least its interpreter")
    run(
        environment, "-p", "support.triton_on_cpu", str(TESTS / "test_equality.py"), "-k", "8_nodes"
    )
