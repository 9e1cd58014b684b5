"""The tensors that an MTP module is checked for are those that vLLM's own loaders read."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
import support.engines  # noqa: F401  vLLM looks at models in this process
from safetensors.torch import load_file, save_file
from support.mtp import KINDS, LAYERS, Kind, save_random
from support.one_rank import one_rank
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.mtp import MTP_MODULES, check_tensors


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rank") / "store"):
        yield


def config_of(target: str) -> Any:
    trees = {"method": "mtp", "tree": "chain"}
    args = EngineArgs(target, skip_tokenizer_init=True, dtype="float32", speculative_config=trees)
    return args.create_engine_config()


def load(model: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, int], bool]:
    """The number of values that vLLM leaves unset, by parameter; whether it refuses to start."""
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loaded, loader = model.load_weights(tensors.items()), object.__new__(DefaultModelLoader)
    try:  # as `DefaultModelLoader.load_weights` does
        if loaded is not None:
            loader.track_weights_loading(model, loaded)
        refused = False
    except ValueError:
        refused = True
    count = {name: int(value.isnan().sum()) for name, value in model.named_parameters()}
    return {name: number for name, number in count.items() if number}, refused


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_tensor_of_a_module(kind: Kind, tmp_path: Path) -> None:
    """Each tensor, if left out, is named, and vLLM does not set all values."""
    target, file = save_random(tmp_path, kind), tmp_path / "model.safetensors"
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    tensors, config = load_file(file), config_of(target)
    draft = config.speculative_config.draft_model_config
    module = MTP_MODULES[architecture]
    assert draft.hf_config.architectures == [module.kind]
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config, model_config=draft)

    def check(names: dict[str, Tensor]) -> Any:
        return check_tensors(CheckpointFiles("", {}, dict.fromkeys(names, file)), module, LAYERS)

    own = [name for name in tensors if "mtp" in name or f"layers.{LAYERS}." in name]
    (complete, refused), found = load(model, tensors), check(tensors)
    shared = re.compile(r"model\.(embed_tokens|layers\.\d\.shared_head\.head)\.weight")
    assert not refused and all(map(shared.fullmatch, complete)), complete  # the target's are used
    assert (found.verdict, found.text) == ("fits", f"the MTP module has all {len(own)}")
    silent = 0
    for name in own:
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        unset, refused = load(model, others)
        assert unset.keys() - complete.keys(), name
        silent += not refused
        found = check(others)
        assert found.verdict == "does not fit" and found.text.startswith(
            f"the MTP module lacks {name!r}; vLLM would"
        )
    assert silent > len(own) / 2, "vLLM names most of them itself"
    own_prefix = module.prefix.format(LAYERS)
    refused_extras = {f"{kind.prefix}self_attn.unknown.weight": torch.ones(1)}
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        extra = {own_prefix + name: tensors["model.embed_tokens.weight"]}
        if name.startswith(module.optional):
            assert check(tensors | extra).verdict == "fits"
            load(model, tensors | extra)
        else:
            refused_extras |= extra
    for name, tensor in refused_extras.items():
        found = check(tensors | {name: tensor})
        assert found.text.startswith(f"the MTP module has {name!r};")
        with pytest.raises((AttributeError, KeyError, ValueError)):
            load(model, tensors | {name: tensor})
    save_file({name: tensor for name, tensor in tensors.items() if name != own[-1]}, file)
    with pytest.raises(MedusaConfigError, match=f"lacks '{own[-1]}'.*Use a complete checkpoint"):
        config_of(target)


def test_both_spellings_of_an_architecture(tmp_path: Path) -> None:
    """vLLM registers K-EXAONE's twice."""
    kind = next(kind for name, kind in KINDS.items() if "exaone" in name.lower())
    target, config = save_random(tmp_path, kind), tmp_path / "config.json"
    text = config.read_text()
    assert "ExaoneMoeForCausalLM" in text
    config.write_text(text.replace("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"))
    config_of(target)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MedusaConfigError, match=r"lacks 'mtp\.norm\.weight'"):
        config_of(target)
