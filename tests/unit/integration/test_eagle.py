"""EAGLE drafters and MTP modules with a tree: the resulting options, refusals before loading."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
import support.engines  # noqa: F401  vLLM looks at models in this process
from safetensors.torch import load_file, save_file
from support.eagle import Eagle3
from support.models import HIDDEN, VOCAB, save_config, save_random_heads
from vllm.engine.arg_utils import EngineArgs

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.integration import compat
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees
from vllm_medusa.integration.startup.eagle_options import check_captured_layers
from vllm_medusa.integration.startup.options import (
    EITHER_SCHEDULER,
    V1_WORKER,
    TreeSettings,
    has_trees,
    is_for_v2,
)
from vllm_medusa.tree.dynamic import Beam, DynamicTree, widest_pool

Config = Callable[..., Any]
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_config(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Eagle3(torch.zeros(VOCAB, HIDDEN), 2 * torch.arange(200), (1, 2, 3))
    return Path(model.save(tmp_path_factory.mktemp("drafter")))


@pytest.fixture
def config(target: str, drafter: Path) -> Config:
    """The engine's config for given options of the drafter and of vLLM."""

    def made(tree: Any = "dynamic", folder: Path = drafter, vllm: Any = (), **options: Any) -> Any:
        given = {"method": "eagle3", "model": str(folder), "tree": tree, **options}
        args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=given, **dict(vllm))
        return args.create_engine_config()

    return made


@pytest.fixture
def other(config: Config, drafter: Path, tmp_path: Path) -> Callable[..., Any]:
    """The options of a drafter with a changed config; tensors and layers of None are removed."""

    def made(changes: dict[str, Any], **tensors: Any) -> TreeSettings:
        shutil.copytree(drafter, tmp_path, dirs_exist_ok=True)
        own = json.loads((drafter / "config.json").read_text()) | changes
        own = {name: value for name, value in own.items() if name != IDS or value is not None}
        (tmp_path / "config.json").write_text(json.dumps(own))
        kept = load_file(drafter / "model.safetensors") | tensors
        kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return TreeSettings.of(config(folder=tmp_path))

    return made


def test_adapters_limit_the_tree(config: Config) -> None:
    """vLLM refuses more cache slots for branches than it has adapter buffers for."""
    few: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    for given, nodes in (({}, 15), ({"num_speculative_tokens": 4}, 4)):
        made = config(vllm=few, **given)
        tree = TreeSettings.of(made).tree
        assert isinstance(tree, DynamicTree) and tree.pool == Beam(3, 3, 6)
        assert tree.num_draft_tokens == nodes
        assert made.speculative_config.num_speculative_tokens == 15
    for given, nodes in (
        ({"num_speculative_tokens": 16}, 51),
        ({"tree": {"width": 4, "depth": 5}}, 60),
    ):
        with pytest.raises(ValueError, match=rf"\(256\).*\(16\).*\({nodes}\).*width or depth"):
            config(vllm=few, **given)
    with pytest.raises(ValueError, match=r"\(6 or more\)"):
        config(vllm=few | {"max_num_seqs": 64})
    wide = TreeSettings.of(config(vllm=few | {"max_num_batched_tokens": 4096})).tree
    assert isinstance(wide, DynamicTree) and wide.pool == Beam(10, 10, 6)


@pytest.mark.parametrize(
    ("given", "beam", "maximum", "budget"),
    [
        ({}, (10, 10, 6), 59, "auto"),
        ({"tree": "dynamic", "budget": 7}, (10, 10, 6), 7, 7),
        ({"tree": {"width": 2, "depth": 2}}, (2, 2, 2), 6, "auto"),
        ({"tree": {"depth": 3}, "num_speculative_tokens": 20}, (10, 10, 3), 20, "auto"),
        ({"tree": {"width": 2, "depth": 2}, "lookup": True}, (2, 2, 2), 59, "auto"),
        ({"tree": "chain"}, (1, 1, 5), 5, 5),
        ({"tree": "chain", "num_speculative_tokens": 3, "budget": "auto"}, (1, 1, 3), 3, "auto"),
    ],
)
def test_engine_settings(
    config: Config, drafter: Path, given: Any, beam: tuple[int, int, int], maximum: int, budget: Any
) -> None:
    made = config(**given)
    options, speculative = TreeSettings.of(made), made.speculative_config
    assert options.tree == DynamicTree(Beam(*beam), 1 + maximum)
    assert (options.budget, options.heads) == (budget, str(drafter))
    assert options.lookup == given.get("lookup", False)
    assert options.depth == (maximum if options.lookup else min(maximum, beam[2]))
    scratch = beam[0] * (beam[2] - 1)
    assert made.num_lookahead_tokens == speculative.num_speculative_tokens == max(maximum, scratch)
    assert has_trees(speculative) and speculative.method == "eagle3"
    assert made.parallel_config.worker_cls == V1_WORKER
    assert made.scheduler_config.scheduler_cls == EITHER_SCHEDULER


def test_the_levels_of_p_eagle_have_a_pool(other: Any) -> None:
    options = other({"mask_token_id": 3}, mask_hidden=torch.zeros(1, 3 * HIDDEN))
    assert options.tree == DynamicTree(widest_pool(6, 10), 60) and options.depth == 6


def test_the_target_is_compared_with_that_of_the_training(
    other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has no weights; `heads.fingerprint` has the outcomes."""
    said: list[str] = []
    monkeypatch.setattr(compat.logger, "info", lambda text, *values: said.append(text % values))
    other({})
    assert not [text for text in said if "compared" in text]
    other({"medusa": {"target": {"sha256": "0", "scheme": 1}}})
    assert len([text for text in said if "was not compared with" in text]) == 1


def test_without_a_tree_vllms_path_is_used(target: str, drafter: Path) -> None:
    given = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=given)
    made = args.create_engine_config()
    assert not has_trees(made.speculative_config)
    assert made.parallel_config.worker_cls != V1_WORKER
    assert not made.additional_config and not made.scheduler_config.scheduler_cls


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tree": "chian"}, "tree is 'chian'; use"),
        ({"tree": {"width": 65}}, "width up to 64"),
        ({"tree": {"breadth": 3}}, "tree is {'breadth': 3}; use"),
        ({"tree": {"width": 3}, "budget": 0}, "budget is 0"),
        ({"num_speculative_tokens": 256}, "num_speculative_tokens is 256"),
        ({"tree": "chain", "lookup": True}, "lookup is True, which needs dynamic trees"),
        ({"lookup": 1}, "lookup is 1; use true or false"),
        ({"method": "eagle"}, 'needs "method": "eagle3"'),
        ({"vllm": {"async_scheduling": True}}, "async scheduling"),
        ({"vllm": {"max_num_seqs": 64, "max_num_batched_tokens": 512}}, "has 640 rows; a step"),
        ({"vllm": {"max_model_len": 50}}, "need 50 cache slots"),
    ],
)
def test_refused(config: Config, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**given)


OFFSETS = torch.arange(200)  # token ids 0, 2, .. 398


def starting_at(first: int) -> torch.Tensor:
    return OFFSETS.index_fill(0, torch.tensor([0]), first)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128, "target_hidden_size": 128}, "for targets with hidden size 128"),
        ({"vocab_size": 500}, "for targets with vocabulary 500"),
        ({IDS: None}, r"has none; vLLM's default is the layers \[2, 2, 1\]"),
        ({IDS: [1, 2]}, r"layers \[1, 2\]; 3 distinct ones"),
        ({IDS: [1, 2, 5]}, "distinct ones from 0 to 4"),
        ({IDS: [0, 1, 2, 3]}, "3 distinct ones"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, 'it has "fc.weight", which vLLM does'),
        ({"sliding_window": 32, "layer_types": ["sliding_attention"]}, "window of 32; .* 64"),
        ({"fc_norm": True, "norm_before_fc": True}, "mutually exclusive"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "is Eagle3DeepseekV3ForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM"]}, 'no "layers.0.self_attn.q_norm.weight"'),
        *((("d2t", starting_at(first)), "has token ids from") for first in (2, -1, 600)),
        (("fc.weight", None), "EAGLE drafter"),
        (("fc.weight", torch.zeros(HIDDEN, HIDDEN)), "belongs to another target"),
        (("fc.bias", torch.zeros(HIDDEN)), 'it has "fc.bias".* Use another drafter'),
        (("fc_norm.0.weight", torch.zeros(HIDDEN)), '"fc_norm": true'),
        (("input_norm.weight", torch.zeros(3 * HIDDEN)), '"norm_before_fc": true'),
        (("layers.0.self_attn.q_norm.weight", torch.zeros(32)), "Eagle3Qwen3ForCausalLM"),
        (("norm.weight", None), 'it has no "norm.weight"'),
        (("mask_hidden", torch.zeros(3 * HIDDEN)), "P-EAGLE"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_other_drafters(other: Any, changes: Any, words: str) -> None:
    """With another config, or with one tensor changed, added or (None) removed."""
    config, tensors = (changes, {}) if isinstance(changes, dict) else ({}, dict([changes]))
    with pytest.raises(MedusaConfigError, match=words):
        other(config, **tensors)


def test_a_tree_wider_than_the_vocabulary(other: Any) -> None:
    tensors = {"lm_head.weight": torch.zeros(8, HIDDEN), "d2t": OFFSETS[:8]}
    with pytest.raises(MedusaConfigError, match="width is 10, but"):
        other({"draft_vocab_size": 8}, **tensors)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budget": 7}, "'budget', which 'eagle3' supports only with a tree: add"),
        ({"tre": "dynamic"}, "unknown key 'tre' .did you mean 'tree'.."),
    ],
)
def test_keys_without_a_tree(target: str, drafter: Path, given: Any, words: str) -> None:
    given = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3} | given
    args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=given)
    with pytest.raises(MedusaConfigError, match=words):
        args.create_engine_config()


def test_swapped_target_and_drafter(drafter: Path, tmp_path: Path) -> None:
    given = {"method": "eagle3", "model": save_random_heads(tmp_path), "tree": "dynamic"}
    args = EngineArgs(str(drafter), skip_tokenizer_init=True, speculative_config=given)
    with pytest.raises(MedusaConfigError, match=r"is an EAGLE drafter, but .* is not. Swap them"):
        args.create_engine_config()


def test_heads_are_not_a_drafter(config: Config, tmp_path: Path) -> None:
    heads = save_random_heads(tmp_path)
    with pytest.raises(MedusaConfigError, match=r'EAGLE drafter.*"method": "medusa"'):
        config(folder=Path(heads))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 36},
        {"sliding_window": 64, "layer_types": ["full_attention"]},
        {"sliding_window": 64, "layer_types": ["sliding_attention"]},
        {"sliding_window": 64},  # Llama's layer has a window only with layer_types
        {IDS: None, "eagle_config": {IDS: [1, 2, 3], "use_aux_hidden_state": True}},
        {"eagle_config": {IDS: [], "use_aux_hidden_state": True, "parallel_draft_step": 1}},
        {"norm_output": True, "norm_before_residual": True},
        {"target_hidden_size": HIDDEN, "target_model_type": "llama", "rope_scaling": None},
    ],
)
def test_additional_keys_in_configs(other: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert other(changes).heads == str(tmp_path)


def test_the_intended_runner(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_for_v2(config().speculative_config)
    monkeypatch.setattr(compat, "uses_v2_runner", lambda _: True)
    with pytest.raises(MedusaConfigError, match="fell back to its V1 model runner"):
        config()


def test_auxiliary_layers_of_the_target(config: Config) -> None:
    made, model = config(), torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.aux_hidden_state_layers = (1, 2, 3)
    check_captured_layers(model, made.speculative_config)
    model.model.aux_hidden_state_layers = (2, 3, 4)
    with pytest.raises(MedusaConfigError, match=r"trained on .* \[1, 2, 3\], but .* \[2, 3, 4\]"):
        check_captured_layers(model, made.speculative_config)


def test_a_loaded_drafter_with_nan_is_refused() -> None:
    trees = EagleTrees()
    trees.model = torch.nn.Linear(4, 4)
    trees.model.bias.data[2] = torch.nan
    with pytest.raises(HeadsError, match=r"'bias' holds NaN or infinity.*Retrain"):
        trees.prepare()


MIMO = {"name": "MiMoForCausalLM", "num_nextn_predict_layers": 1, "num_hidden_layers": 4}


@pytest.fixture
def module(tmp_path: Path) -> Config:
    """The engine's config for given options, another target, and further options of vLLM."""

    def made(given: Any, architecture: str = "Qwen2", vllm: Any = (), **changes: Any) -> Any:
        own = MIMO if architecture == "Qwen2" else {}
        target = save_config(tmp_path, architecture, **own | changes)
        given = {"method": "mtp", **given}
        args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=given, **dict(vllm))
        return args.create_engine_config()

    return made


def test_settings_of_a_module(module: Config, tmp_path: Path) -> None:
    """The revision is the target's, because vLLM would load the module from the main branch."""
    made = module({"tree": {"width": 3, "depth": 4}, "budget": 7}, vllm={"revision": "v1"})
    options, speculative = TreeSettings.of(made), made.speculative_config
    assert options.tree == DynamicTree(Beam(3, 3, 4), 8)
    assert (options.heads, options.revision) == (str(tmp_path), "v1")
    assert has_trees(speculative) and speculative.method == "mtp"
    assert (speculative.model, speculative.revision) == (str(tmp_path), "v1")
    assert made.num_lookahead_tokens == 9  # the branches' slots
    assert made.parallel_config.worker_cls == V1_WORKER


def test_a_module_without_a_tree_uses_vllms_path(module: Config) -> None:
    made = module({"num_speculative_tokens": 2})
    assert not has_trees(made.speculative_config)
    assert made.parallel_config.worker_cls != V1_WORKER


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen2", {"num_nextn_predict_layers": 2}, "= 2; trees need exactly one.* Omit"),
        ("Qwen2", {"num_nextn_predict_layers": 0}, "= 0; trees .* Use another checkpoint"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 63, "max_window_layers": 0},
            r"MTP module of .* has a sliding window of 63; .* 64.* Omit",
        ),
        (
            "ExaoneMoe",
            {"num_nextn_predict_layers": 1, "mtp_sliding_windows": [32]},
            r"MTP module of .* has a sliding window of 32; .* Omit",
        ),
        ("Llama", {}, "LlamaForCausalLM.* has no MTP module that vLLM supports. Use"),
        (
            "Qwen3Next",
            {},
            r"\(Qwen3NextForCausalLM\) .* type Qwen3NextMTP; .* only the .* MiMoForCausalLM.* Omit",
        ),
    ],
)
def test_targets_without_a_suitable_module(
    module: Config, architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(MedusaConfigError, match=words):
        module({"tree": "dynamic"}, architecture, **changes)


@pytest.mark.parametrize(
    ("given", "vllm", "words"),
    [
        ({"model": "other"}, {}, "model is 'other'; use no value"),
        ({"revision": "v1"}, {}, "revision is 'v1'; use no value"),
        ({"tree": "chian"}, {}, "tree is 'chian'; use"),
        ({"method": "mimo_mtp"}, {}, "method is 'mimo_mtp'.* \"mtp\""),
        ({}, {"max_model_len": 50}, "need 50 cache slots"),
    ],
)
def test_refused_with_a_module(module: Config, given: Any, vllm: Any, words: str) -> None:
    with pytest.raises(MedusaConfigError, match=words):
        module({"tree": "dynamic", **given}, vllm=vllm)
