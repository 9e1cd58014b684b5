"""Everything in vLLM that we use exists, with the parameters that we rely on.

Parameters are read from the source, because the plugin may have replaced functions. The
tables hold for both 0.32 and 0.33 (`e2e/test_vllm_033.py`); exceptions are in `MOVED`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vllm_medusa import integration
from vllm_medusa.plugin import SUPPORTED_VLLM

PACKAGE = Path(__file__).parents[2] / "vllm_medusa"
FILES = sorted(PACKAGE.rglob("*.py"))

PATCHED = {  # see vllm_medusa/integration/overrides.py
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
NAMED = {  # looked up by name at run time: as a patched global, or an attribute
    ("vllm.v1.worker.cpu_worker", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "init_speculator"),
    ("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    ("vllm._custom_ops", "_supports_onednn"),
    ("vllm._custom_ops", "create_onednn_mm"),
    ("vllm._custom_ops", "onednn_mm"),
}
USED = {  # attributes that are read, set or shadowed: source lines of their class
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
# Shims: (release, location there, location in later releases).
MOVED = {
    (
        (0, 32),
        ("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
        ("vllm.entrypoints.common.startup", "cli_env_setup"),
    ),
}
# vLLM would silently ignore a method of ours that no longer overrides anything.
OVERRIDES = {
    "MedusaModelRunner": {
        "load_model", "initialize_kv_cache", "_prepare_inputs", "_build_attention_metadata",
        "_sample", "propose_draft_token_ids", "_input_fits_in_drafter", "_update_states",
        "take_draft_token_ids", "execute_model", "sample_tokens",
    },
    "MedusaCPUWorker": {"init_device"},
    "TreeMetadataBuilder": {"build"},
    "TreeAttentionBackend": {"get_impl_cls", "get_builder_cls"},
    "TreeAttentionImpl": {"__init__"},
    "TreeMLABuilder": {"build"},  # for MLA
    "_TreeImpl": {"forward_mqa"},
    "TreeMLABackend": {"get_impl_cls", "get_builder_cls"},
    "TreeAMXMLABackend": {"get_impl_cls", "get_builder_cls"},
    "TreeSpeculator": {"__init__", "load_draft_model", "set_attn", "propose", "capture"},
    "EagleTreeDrafter": {"__init__", "load_model", "dummy_run"},  # on V1
    "TreeModelState": {
        "add_request", "initialize_kv_cache", "prepare_attn", "prepare_inputs",
        "prepare_dummy_inputs", "custom_sampler", "postprocess_state",
    },
    "TreeSampler": {"__init__", "__call__"},
    "GuidedSampler": {"sample"},
    "TreeScheduler": {
        "schedule", "update_from_output", "make_stats", "update_draft_token_ids", "shutdown",
        "get_grammar_bitmask",
    },
    "TreeAsyncScheduler": {"update_from_output", "_update_after_schedule"},
    "MedusaWorker": {"sample_tokens", "load_model", "compile_or_warm_up_model"},
    "DepthLogging": {"__init__", "observe"},
}  # fmt: skip
FREE = {"__init__", "__post_init__"}  # called by us, or with our keywords


def found(module: str, name: str | None) -> Any:
    """The result of an import; None if it fails."""
    try:
        place = importlib.import_module(module)
        if name is None or hasattr(place, name):
            return place if name is None else getattr(place, name)
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None


def imports_of_vllm() -> Iterator[tuple[str, str | None]]:
    """(module, name) of everything that our files import from vLLM, at any level."""
    for node in (node for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def functions(place: Any) -> dict[str, ast.arguments]:
    """Parameters of the functions in the source of a module or class."""
    body: list[ast.stmt] = ast.parse(textwrap.dedent(inspect.getsource(place))).body
    if inspect.isclass(place):
        body = body[0].body  # type: ignore[attr-defined]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node.args for node in body if isinstance(node, defined)}


def method(owner: type, name: str) -> ast.arguments | None:
    """Parameters of vLLM's method that a class has or inherits."""
    classes = [each for each in owner.__mro__ if each.__module__.split(".")[0] == "vllm"]
    return next((functions(each)[name] for each in classes if name in functions(each)), None)


def positional(parameters: ast.arguments) -> list[str]:
    return [arg.arg for arg in (*parameters.posonlyargs, *parameters.args)]


def stand_in(ours: ast.arguments, stock: ast.arguments) -> bool:
    """Whether a caller of ``stock`` can call ``ours``; ``*args`` means positional."""
    named, wanted = positional(ours), positional(stock)
    if named != wanted[: len(named)] or (len(wanted) > len(named) and ours.vararg is None):
        return False
    names = [{arg.arg for arg in each.kwonlyargs} for each in (stock, ours)]
    return ours.kwarg is not None or names[0] <= names[1]


def test_every_import_exists() -> None:
    imports = set(imports_of_vllm())
    assert len(imports) > 50
    moved = {place for _, *places in MOVED for place in places}
    assert {place for place in imports if found(*place) is None} <= moved
    assert [place for place in sorted(NAMED) if found(*place) is None] == []


def test_shims_are_required_and_sufficient() -> None:
    for release, old, new in MOVED:
        assert (found(*old) is None) != (found(*new) is None), f"{old} or {new}"
        # If this fails, import from the new location instead of the shim and remove the entry.
        assert release in SUPPORTED_VLLM, f"{old}: remove the shim for {release}"


def test_patched_functions_have_these_parameters() -> None:
    for (module, name), expected in PATCHED.items():
        owner, _, own = name.rpartition(".")
        stock = method(found(module, owner), own) if owner else functions(found(module, None))[own]
        assert stock is not None, f"{module} has no {name}"
        assert tuple(positional(stock)) == expected and not stock.kwonlyargs, name


def test_attributes_exist() -> None:
    for (module, name), mentions in USED.items():
        text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(found(module, name)))))
        assert not (gone := {each for each in mentions if each not in text}), f"{name}: {gone}"


def test_methods_override_the_intended_ones() -> None:
    seen: dict[str, set[str]] = {}
    for module in pkgutil.walk_packages(integration.__path__, "vllm_medusa.integration."):
        for owner in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(owner) or owner.__module__ != module.name:
                continue
            for name, ours in functions(owner).items():
                if (stock := method(owner, name)) is None:
                    continue
                seen.setdefault(owner.__name__, set()).add(name)
                if name not in FREE:
                    assert stand_in(ours, stock), f"{owner.__name__}.{name} for {name}"
    for name, names in OVERRIDES.items():
        assert names <= seen.get(name, set()), f"{name} overrides {seen.get(name)} only"
