"""The command line, through vLLM's own parser, to vLLM's own config."""

import json

import pytest
import torch

pytest.importorskip("vllm")
from support.eagle import Eagle3
from support.hydra import random_hydra
from support.models import save_random_heads
from support.vllm_parser import server_parser
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.integration import compat
from vllm_medusa.integration.startup.options import DRAFTER, V1_WORKER, TreeSettings
from vllm_medusa.tree import TokenTree, load_preset
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.presets import DEFAULT_TREE

TREE = [[0], [0, 0], [1]]


@pytest.fixture(scope="module")
def parser():
    return server_parser()


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return save_random_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def parse(parser, target):
    def parsed(*arguments):
        basics = ["--model", target, "--dtype", "float32", "--skip-tokenizer-init"]
        return AsyncEngineArgs.from_cli_args(parser.parse_args([*basics, *arguments]))

    return parsed


@pytest.fixture
def config(target):
    """The engine's config for these Python arguments."""

    def made(keys, **more):
        args = EngineArgs(target, skip_tokenizer_init=True, speculative_config=keys, **more)
        return args.create_engine_config()

    return made


def options(args: EngineArgs) -> TreeSettings:
    return TreeSettings.of(args.create_engine_config())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-model", "HEADS"],
        ["--speculative-model=HEADS"],
        ["--speculative_model", "HEADS"],
        ["--speculative-model", "HEADS", "--spec-method", "medusa"],
        ["--speculative-model", "HEADS", "--speculative-config", '{"method": "medusa"}'],
        ["--spec-method", "medusa", "--spec-model", "HEADS"],
        ["--spec-method", "medusa", "--speculative-config", '{"model": "HEADS"}'],
        ["--speculative-config.method", "medusa", "--speculative-config.model", "HEADS"],
    ],
    ids=" ".join,
)
def test_all_equivalent_arguments(parse, heads, arguments):
    found = options(parse(*[argument.replace("HEADS", heads) for argument in arguments]))
    assert found.heads == heads
    assert isinstance(found.tree, DynamicTree) and found.budget == "auto"
    assert found.acceptance.mode == "lossless"


def test_the_flag_beside_other_options(parse, heads):
    keys = {"tree": "mc_sim_7b_63", "acceptance": {"mode": "typical", "epsilon": 0.2}}
    more = "--spec-tokens", "20", "--speculative-config", json.dumps(keys)
    config = parse("--speculative-model", heads, *more).create_engine_config()
    found = TreeSettings.of(config)
    assert found.tree == load_preset("mc_sim_7b_63").prefix(21)
    assert (found.acceptance.mode, found.acceptance.epsilon) == ("typical", 0.2)
    spec = config.speculative_config
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("custom_class", DRAFTER, 20)
    assert config.parallel_config.worker_cls == V1_WORKER


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--spec-model", "other"], ["--spec-model = 'other'", "Omit one"]),
        (["--speculative-config", '{"model": "other"}'], ["['model']", "Omit one"]),
        (["--spec-method", "ngram"], ["--spec-method = 'ngram'", "Omit one"]),
        (["--speculative-config", '{"method": "eagle"}'], ["'eagle'", "Omit"]),
    ],
)
def test_conflicts_with_the_flag(parse, heads, arguments, words):
    with pytest.raises(ValueError, match="--speculative-model") as caught:
        parse("--speculative-model", heads, *arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("flag", ["--spec-method medusa", "--spec-model HEADS", "--spec-tokens 3"])
def test_duplicate_options(parse, heads, flag):
    keys = {"method": "medusa", "model": heads, "num_speculative_tokens": 4}
    args = parse("--speculative-config", json.dumps(keys), *flag.replace("HEADS", heads).split())
    with pytest.raises(ValueError, match=r"same option|mutually exclusive") as caught:
        args.create_engine_config()
    assert flag.split()[0] in str(caught.value)


@pytest.mark.parametrize(("seqs", "warned"), [(64, False), (65, True)])
def test_a_warning_if_running_requests_can_fill_a_step(parse, heads, monkeypatch, seqs, warned):
    lines = []
    monkeypatch.setattr(compat.logger, "warning_once", lambda t, *values: lines.append(t % values))
    tree = {"tree": {"chain": 3}}
    limits = ["--max-num-seqs", str(seqs), "--max-num-batched-tokens", "256"]
    limits += ["--max-model-len", "256"]
    args = parse("--speculative-model", heads, "--speculative-config", json.dumps(tree), *limits)
    args.create_engine_config()
    found = [line for line in lines if "max_num_batched_tokens to 260 or more" in line]
    assert len(found) == warned
    assert all("65 running requests" in x and "max_num_seqs to 64" in x for x in found)


def test_a_static_tree_must_fit_a_step(config, heads):
    """A step of as many tokens as the tree has nodes, root included, is enough."""
    keys = {"method": "medusa", "model": heads, "tree": {"chain": 3}}
    limits = {"max_num_seqs": 1, "max_model_len": 4, "enable_chunked_prefill": False}
    made = config(keys, **limits, max_num_batched_tokens=4)
    assert TreeSettings.of(made).tree.num_nodes == 4
    limits["max_model_len"] = 3
    with pytest.raises(ValueError, match=r"has 4 nodes .* at most 3 tokens"):
        config(keys, **limits, max_num_batched_tokens=3)


def test_a_target_without_heads(config):
    with pytest.raises(ValueError, match=r'file itself\. The target .*"lookup": true'):
        config({"method": "medusa"})


def test_a_tree_from_a_file_is_capped(config, heads, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"paths": TREE, "source": "by hand"}))
    for cap in (None, 2, 200):
        keys = {"method": "medusa", "model": heads, "tree": str(file)}
        found = TreeSettings.of(config(keys | {"num_speculative_tokens": cap})).tree
        assert found == TokenTree.from_paths(TREE).prefix(1 + min(3, cap or 3))


def test_the_heads_own_tree(config, heads, tmp_path):
    without = {"method": "medusa", "model": heads, "tree": "heads"}
    cut = DEFAULT_TREE.cut(max_depth=4, num_ranks=512)
    assert TreeSettings.of(config(without)).tree == cut
    heads = MedusaHeads(3, 1, 64, 512, num_lm_heads=0)
    save_heads(tmp_path, heads.to(torch.float32), {"tree": TREE})
    keys = {"method": "medusa", "model": str(tmp_path)}
    assert TreeSettings.of(config(keys | {"tree": "heads"})).tree == TokenTree.from_paths(TREE)
    assert TreeSettings.of(config(keys | {"tree": {"chain": 2}})).tree == TokenTree.chain(2)
    assert isinstance(TreeSettings.of(config(keys)).tree, DynamicTree)


def test_the_users_arguments_are_not_modified(target, heads):
    keys = {"method": "medusa", "model": heads, "tree": TREE}
    extra = {"mine": {"a": 1}}
    kept = json.dumps([keys, extra])
    args = EngineArgs(
        target, skip_tokenizer_init=True, speculative_config=keys, additional_config=extra
    )
    first = args.create_engine_config()
    second = args.create_engine_config()
    assert json.dumps([keys, extra]) == kept
    assert first.additional_config["mine"] == {"a": 1}
    assert TreeSettings.of(first) == TreeSettings.of(second)


@pytest.mark.parametrize(
    "keys",
    [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}],
    ids=["plain", "ngram"],
)
def test_without_medusa_the_config_is_unchanged(config, keys, monkeypatch):
    def made():
        found = config(keys and dict(keys))
        found.instance_id = ""
        return found

    hooked = made()
    for name in ("create_speculative_config", "create_engine_config"):
        hook = vars(EngineArgs)[name]
        assert hook.__medusa_override__
        monkeypatch.setattr(EngineArgs, name, hook.__wrapped__)
    stock = made()
    assert repr(hooked) == repr(stock)
    assert hooked.compute_hash() == stock.compute_hash()
    assert "medusa" not in (hooked.additional_config or {})
    assert hooked.parallel_config.worker_cls == stock.parallel_config.worker_cls != V1_WORKER


@pytest.mark.parametrize(
    "keys",
    [
        {"tree": [[0]]},
        {"method": "ngram", "num_speculative_tokens": 2, "acceptance": "typical"},
        {"method": "Medusa"},
        {"method": "medussa"},
    ],
    ids=["no method", "another method", "capital", "misspelled"],
)
def test_our_keys_without_our_method(config, heads, keys):
    if keys.get("method") != "ngram":
        keys = {"model": heads, **keys}
    with pytest.raises(ValueError, match='Trees need "method": "medusa"'):
        config(keys)


def test_adapters_limit_the_drafts_of_a_request(config, heads):
    """vLLM refuses more nodes per step than it has adapter buffers for."""
    few = {"enable_lora": True, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    keys = {"method": "medusa", "model": heads}
    assert config(keys, **few).speculative_config.num_speculative_tokens == 7
    with pytest.raises(ValueError, match=r"\(128\).*\(16\).*\(31\).*Raise max_num_batched_tokens"):
        config(keys | {"num_speculative_tokens": 30}, **few)
    fewest = config(keys, **few | {"max_num_seqs": 64})
    assert fewest.speculative_config.num_speculative_tokens == 1
    with pytest.raises(ValueError, match=r"2 or more"):
        config(keys, **few | {"max_num_seqs": 128})
    many = config(keys, **few | {"enable_lora": False}).speculative_config
    assert many.num_speculative_tokens > 7


def test_hydra_heads_expand_a_beam(config, tmp_path):
    heads = str(save_heads(tmp_path / "hydra", random_hydra(3)))
    keys = {"method": "medusa", "model": heads}
    tree = TreeSettings.of(config(keys | {"budget": 20})).tree
    assert isinstance(tree, DynamicTree) and tree.pool == Beam(10, 10, 3) and tree.num_nodes == 21
    assert TreeSettings.of(config(keys | {"tree": {"chain": 3}})).tree == TokenTree.chain(3)


def test_hydra_heads_without_a_method(config, tmp_path):
    """Otherwise the error would be that Transformers does not recognize the architecture."""
    heads = str(save_heads(tmp_path / "hydra", random_hydra(3)))
    with pytest.raises(ValueError, match=r'has no method, but .*hydra holds .* "method": "medusa"'):
        config({"model": heads})


def test_the_folder_of_an_eagle_drafter_is_recognized(parse, tmp_path):
    drafter = Eagle3(torch.zeros(512, 64), torch.arange(512), (0, 1, 2)).save(tmp_path)
    own = {"method": "eagle3", "tree": "dynamic", "model": drafter}
    for more in ((), ("--speculative-config", '{"method": "eagle3"}')):
        assert parse("--speculative-model", drafter, *more).speculative_config == own
    given = parse("--speculative-model", drafter, "--speculative-config", '{"tree": "chain"}')
    assert given.speculative_config == own | {"tree": "chain"}


@pytest.mark.parametrize("given", ["medusa", [1, 2]])
def test_a_configuration_that_is_not_an_object_is_refused(config, given):
    with pytest.raises(ValueError, match=r"speculative_config is .*; use an object such as"):
        config(given)
