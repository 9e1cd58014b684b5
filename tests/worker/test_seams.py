"""What we take from vLLM and put into it is there, with the parameters we count on.

Read from the source, so a release that can not run here is looked at too: 0.33, where its files
are at hand (`support.overlay`). The tables hold for 0.32 and 0.33 alike; what does not is `MOVED`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.overlay import VARIABLE, installed, python_files_of_033
from support.vllm_source import Parameters, Source, methods, vllm_imports

from vllm_medusa.plugin import SUPPORTED_VLLM

PACKAGE = Path(__file__).parents[2] / "vllm_medusa"
FILES = sorted(PACKAGE.rglob("*.py"))

PATCHED = {  # see vllm_medusa/worker/overrides.py
    ("vllm.engine.arg_utils", "EngineArgs.create_speculative_config"): (
        "self", "target_model_config", "target_parallel_config",
    ),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config"): (
        "self", "usage_context", "headless",
    ),
    ("vllm.engine.arg_utils", "EngineArgs.add_cli_args"): ("parser",),
    ("vllm.engine.arg_utils", "EngineArgs.from_cli_args"): ("cls", "args"),
    ("vllm.sampling_params", "SamplingParams._validate_spec_decode"): (
        "self", "speculative_config",
    ),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger.__init__"): (
        "self", "vllm_config", "engine_indexes",
    ),
    ("vllm.v1.metrics.loggers", "LoggingStatLogger.__init__"): (
        "self", "vllm_config", "engine_index",
    ),
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.get_all_weights"): (
        "self", "model_config", "model",
    ),
    ("vllm.v1.sample.thinking_budget_state", "ThinkingBudgetStateHolder.sync_batch"): (
        "self", "batch_update",
    ),
    ("vllm.v1.worker.gpu.spec_decode", "init_speculator"): (
        "vllm_config", "device", "req_states",
    ),
}  # fmt: skip
NAMED = {  # looked up by name at run time: as a global that is swapped, or an attribute
    ("vllm.v1.worker.cpu_worker", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "init_speculator"),
    ("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    ("vllm._custom_ops", "_supports_onednn"),
    ("vllm._custom_ops", "create_onednn_mm"),
    ("vllm._custom_ops", "onednn_mm"),
}
USED = {  # attributes that are read, set or shadowed: how their class mentions them
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger"): {
        "self.spec_decoding_prom = self._spec_decoding_cls(", "_counter_cls = ", "_gauge_cls = ",
    },
    ("vllm.v1.metrics.loggers", "LoggingStatLogger"): {
        "self.spec_decoding_logging = ", "self.spec_decoding_logging.log(log_fn=log_fn)",
    },
    ("vllm.v1.core.sched.scheduler", "Scheduler"): {
        "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(num_scheduled_tokens)]",
        "self._update_after_schedule(scheduler_output)",
        "request.spec_token_ids = self.structured_output_manager.validate_tokens(",
    },
    ("vllm.v1.structured_output", "StructuredOutputManager"): {
        "def _get_constraint_bounds(", "self.tokenizer = ", "self.backend = ",
        "Returns `len(spec_tokens) + 1` if no token should be constrained",
    },
    ("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar"): {
        "def accept_tokens(self, request_id: str, tokens: list[int]) -> bool", "def rollback(",
        "def validate_tokens(", "def fill_bitmask(", "def is_terminated(",
    },
    ("vllm.v1.worker.gpu.states", "RequestState"): {
        "self.all_token_ids = StagedWriteTensor(", "self.all_token_ids.stage_write(",
        "(self.max_num_reqs, self.max_model_len),", "self.device = device",
    },
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"): {
        "request.spec_token_ids = self._spec_token_placeholders",
    },
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput"): {
        "self.model_runner_output = model_runner_output", "return self.model_runner_output",
    },
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"): {
        "num_speculative_tokens=num_spec_tokens", "draft_tokens[:, num_spec_tokens:] = -1",
    },
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator"): {
        "all_attn_layers[layer_name].is_draft_layer = True", "self.block_tables = block_tables",
        "self.attn_groups, self.attn_cg_support, _ = init_attn_backend(",
    },
    ("vllm.v1.worker.gpu.block_table", "BlockTables"): {
        "self.input_block_tables: list[torch.Tensor] = ", "self.block_sizes = block_sizes",
    },
    ("vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager"): {
        "speculative_config.num_speculative_tokens_per_batch_size",
    },
    ("vllm.v1.spec_decode.metrics", "SpecDecodingStats"): {"num_draft_tokens_per_pos: list[int]"},
}  # fmt: skip
# Shims: (release it is for, its place there, its place in later releases).
MOVED = {
    (
        (0, 32),
        ("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
        ("vllm.entrypoints.common.startup", "cli_env_setup"),
    ),
}
# A method of ours that no longer overrides anything would be silently left out by vLLM.
OVERRIDES = {
    "MedusaModelRunner": {
        "load_model", "initialize_kv_cache", "_prepare_inputs", "_build_attention_metadata",
        "_sample", "propose_draft_token_ids", "_input_fits_in_drafter", "_bookkeeping_sync",
        "_update_states",
    },
    "MedusaCPUWorker": {"init_device"},
    "TreeMetadataBuilder": {"build"},
    "TreeAttentionBackend": {"get_impl_cls", "get_builder_cls"},
    "TreeAttentionImpl": {"__init__", "forward"},
    "TreeSpeculator": {"__init__", "load_draft_model", "set_attn", "propose", "capture"},
    "EagleTreeDrafter": {"__init__", "load_model", "dummy_run"},  # on V1
    "TreeModelState": {
        "add_request", "initialize_kv_cache", "prepare_attn", "prepare_inputs",
        "prepare_dummy_inputs", "custom_sampler", "postprocess_state",
    },
    "TreeSampler": {"__init__", "__call__"},
    "GrammarScheduler": {
        "schedule", "update_from_output", "update_draft_token_ids", "get_grammar_bitmask",
    },
    "TreeScheduler": {
        "schedule", "update_from_output", "make_stats", "update_draft_token_ids", "shutdown",
    },
    "TreeAsyncScheduler": {"schedule", "update_from_output", "_update_after_schedule"},
    "WithTrees": {"sample_tokens", "load_model", "compile_or_warm_up_model"},
    "DepthLogging": {"__init__", "observe", "log"},
}  # fmt: skip
FREE = {"__init__", "__post_init__"}  # called by us, or with keywords of ours


@pytest.fixture(scope="module", params=["installed", "0.33"])
def source(request: pytest.FixtureRequest) -> Source:
    if request.param == "installed":
        return Source(installed())
    files = python_files_of_033()
    if files is None:
        pytest.skip(f"{VARIABLE} does not say where the Python files of vLLM 0.33 are")
    return Source(files)


def missing(source: Source, trees: list[ast.Module]) -> set[str]:
    """Imports that would fail."""
    return {
        f"{module}: {name}"
        for tree in trees
        for module, name in vllm_imports(tree)
        if not source.has(module, name)
    }


def overriding(
    source: Source, tree: ast.Module
) -> list[tuple[str, str, Parameters, Parameters | None]]:
    """(class, method, its parameters, vLLM's or None) in the classes that derive from vLLM's."""
    found = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            place = source.place(tree, "", base)
            if place is None or source.home(*place) is None:
                continue
            for method in methods(node):
                stock = source.parameters(place[0], f"{place[1]}.{method.name}")
                found.append((node.name, method.name, Parameters.of(method), stock))
    return found


def test_every_import_is_there(source: Source) -> None:
    trees = [ast.parse(file.read_text()) for file in FILES]
    assert sum(1 for tree in trees for _ in vllm_imports(tree)) > 50
    moved = {place for _, *places in MOVED for place in places}
    assert missing(source, trees) <= {f"{module}: {name}" for module, name in moved}
    assert [seam for seam in sorted(NAMED) if not source.has(*seam)] == []


def test_shims_are_needed_and_enough(source: Source) -> None:
    for release, old, new in MOVED:
        assert source.has(*old) != source.has(*new), f"{old} or {new}"
        # Once this fails, import the new place where the shim is used now and drop the entry.
        assert release in SUPPORTED_VLLM, f"{old}: the shim for {release} can go"


def test_patched_functions_have_these_parameters(source: Source) -> None:
    for (module, name), expected in PATCHED.items():
        found = source.parameters(module, name)
        assert found is not None, f"{module} has no {name}"
        assert found.positional == expected and not found.keyword_only, name


def test_attributes_are_there(source: Source) -> None:
    for (module, name), mentions in USED.items():
        found = source.home(module, name)
        assert found is not None, f"{module} has no {name}"
        text = ast.unparse(found[1])
        assert not (gone := {each for each in mentions if each not in text}), f"{name}: {gone}"


def test_methods_override_what_they_are_meant_to(source: Source) -> None:
    seen: dict[str, set[str]] = {}
    for file in FILES:
        for owner, name, ours, stock in overriding(source, ast.parse(file.read_text())):
            if stock is None:
                continue
            seen.setdefault(owner, set()).add(name)
            if name not in FREE:
                assert ours.stand_in_for(stock), f"{owner}.{name}: {ours} for {stock}"
    for owner, names in OVERRIDES.items():
        assert names <= seen.get(owner, set()), f"{owner} overrides {seen.get(owner)} only"


PLANTED = """
from vllm.v1 import starred, unstarred
from vllm.v1.runner import Runner, gone
class Ours(Runner):
    def sample(self, logits): ...
    def renamed(self): ...
    def wide(self, a, *args, **kwargs): ...
"""


def test_a_release_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "v1"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .stars import *")
    (package / "stars.py").write_text("starred = 1")
    (package / "base.py").write_text(
        "class Base:\n    def sample(self, logits, mask): ...\n    def wide(self, a, b, *, c): ..."
    )
    (package / "runner.py").write_text(
        "from .base import Base as Stock\nif True:\n    class Runner(Stock[int]): ...\n"
    )
    source, tree = Source(tmp_path), ast.parse(PLANTED)
    assert missing(source, [tree]) == {"vllm.v1.runner: gone", "vllm.v1: unstarred"}
    found = {name: (ours, stock) for _, name, ours, stock in overriding(source, tree)}
    ours, stock = found["sample"]
    assert stock == Parameters(("self", "logits", "mask")) and not ours.stand_in_for(stock)
    assert found["renamed"][1] is None
    ours, stock = found["wide"]
    assert stock is not None and ours.stand_in_for(stock)
