"""MTP modules with a tree: the resulting options, and refusals before weights load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import support.engines  # noqa: F401  vLLM looks at models in this process
from support.models import save_config
from vllm.engine.arg_utils import EngineArgs

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.integration.options import V1_WORKER, TreeSettings, has_trees
from vllm_medusa.tree.dynamic import Beam, DynamicTree

Config = Callable[..., Any]
MIMO = {"name": "MiMoForCausalLM", "num_nextn_predict_layers": 1, "num_hidden_layers": 4}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The engine's config for given options, another target, and further options of vLLM."""

    def made(given: Any, architecture: str = "Qwen2", vllm: Any = (), **changes: Any) -> Any:
        own = MIMO if architecture == "Qwen2" else {}
        target = save_config(tmp_path, architecture, **own | changes)
        given = {"method": "mtp", **given}
        args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=given, **dict(vllm))
        return args.create_engine_config()

    return made


def test_the_engine_s_settings(config: Config, tmp_path: Path) -> None:
    """The revision is the target's, because vLLM would load the module from the main branch."""
    made = config({"tree": {"width": 3, "depth": 4}, "budget": 7}, vllm={"revision": "v1"})
    options, speculative = TreeSettings.of(made), made.speculative_config
    assert options.tree == DynamicTree(Beam(3, 3, 4), 8)
    assert (options.heads, options.revision) == (str(tmp_path), "v1")
    assert has_trees(speculative) and speculative.method == "mtp"
    assert (speculative.model, speculative.revision) == (str(tmp_path), "v1")
    assert made.num_lookahead_tokens == 9  # the branches' slots
    assert made.parallel_config.worker_cls == V1_WORKER


def test_without_a_tree_vllms_path_is_used(config: Config) -> None:
    made = config({"num_speculative_tokens": 2})
    assert not has_trees(made.speculative_config)
    assert made.parallel_config.worker_cls != V1_WORKER


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen2", {"num_nextn_predict_layers": 2}, "= 2; trees need exactly one.* Omit"),
        ("Qwen2", {"num_nextn_predict_layers": 0}, "= 0; trees .* Use another checkpoint"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            r"MTP module of .* has a sliding window \(64\).* Omit",
        ),
        ("Llama", {}, "LlamaForCausalLM.* has no MTP module that vLLM supports. Use"),
        ("Qwen3Next", {}, "type Qwen3NextMTP; trees support only MiMoMTPModel.* Omit"),
    ],
)
def test_other_targets(
    config: Config, architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(MedusaConfigError, match=words):
        config({"tree": "dynamic"}, architecture, **changes)


@pytest.mark.parametrize(
    ("given", "vllm", "words"),
    [
        ({"model": "other"}, {}, "model is 'other'; use nothing: omit it"),
        ({"revision": "v1"}, {}, "revision is 'v1'; use nothing: omit it"),
        ({"tree": "chian"}, {}, "tree is 'chian'; use"),
        ({"tree": "chain", "lookup": True}, {}, "lookup is True, which needs dynamic trees"),
        ({"method": "mimo_mtp"}, {}, "method is 'mimo_mtp'.* \"mtp\""),
        ({}, {"max_model_len": 50}, "need 50 cache slots"),
    ],
)
def test_refused(config: Config, given: Any, vllm: Any, words: str) -> None:
    with pytest.raises(MedusaConfigError, match=words):
        config({"tree": "dynamic", **given}, vllm=vllm)
