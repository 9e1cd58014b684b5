"""The options: what is accepted, what is refused, and the messages."""

import copy
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.config import (
    AcceptanceConfig,
    MedusaConfig,
    MedusaConfigError,
    RequestConfig,
    resolve_tree,
    reuse_compiled_models,
)
from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset
from vllm_medusa.tree.topology import TokenTree

LOSSLESS = AcceptanceConfig()
TYPICAL = AcceptanceConfig(mode="typical", epsilon=0.5, delta=0.25, greedy_root=True)


class TestAcceptance:
    def test_default_is_lossless(self):
        assert AcceptanceConfig().mode == "lossless"
        assert AcceptanceConfig.parse(None) == AcceptanceConfig.parse("lossless")

    def test_forms(self):
        assert AcceptanceConfig.parse("typical") == AcceptanceConfig(mode="typical")
        assert AcceptanceConfig.parse(TYPICAL) is TYPICAL
        given = {"mode": "typical", "epsilon": 0.5, "delta": 0.25, "greedy_root": True}
        assert AcceptanceConfig.parse(given) == TYPICAL
        assert AcceptanceConfig.parse({"mode": "typical", "epsilon": 1}).epsilon == 1.0

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("typicl", r"mode is 'typicl'; use \"lossless\" or \"typical\""),
            (3, "Medusa acceptance is 3; use"),
            ({"mode": "typical", "epsilon": 0}, "epsilon is 0; use a number above 0 and at most"),
            ({"mode": "typical", "delta": -0.1}, "delta is -0.1; use a number"),
            ({"mode": "typical", "greedy_root": 1}, "greedy_root is 1; use true or false"),
            ({"mode": "typical", "epsilon": 2, "delta": 2}, "epsilon is 2.*delta is 2"),
            ({"mode": "typical", "epsilom": 1}, r"'epsilom' is unknown .did you mean 'epsilon'"),
            ({"epsilon": 0.5}, "epsilon is 0.5, which has no effect in lossless mode; choose typ"),
            ({"mode": "lossless", "greedy_root": True}, "greedy_root is True, which has no effect"),
        ],
    )
    def test_refusals(self, value, words):
        with pytest.raises(MedusaConfigError, match=words):
            AcceptanceConfig.parse(value)


class TestRequestArguments:
    @pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"medusa": None}])
    @pytest.mark.parametrize("default", [AcceptanceConfig(), TYPICAL])
    def test_missing_options_keep_the_default(self, extra, default):
        expected = RequestConfig(**default.model_dump())
        assert RequestConfig.from_extra_args(extra, default) == expected

    @pytest.mark.parametrize(
        ("options", "default", "expected"),
        [
            ({}, TYPICAL, TYPICAL),
            ({"acceptance": "typical"}, LOSSLESS, {}),
            ({"acceptance": "lossless"}, TYPICAL, LOSSLESS),
            ("lossless", TYPICAL, LOSSLESS),
            ("typical", LOSSLESS, {}),
            ('{"acceptance": "typical", "delta": 0.5}', LOSSLESS, {"delta": 0.5}),
            ({"acceptance": "typical"}, TYPICAL, TYPICAL),
            ({"delta": 0.75}, TYPICAL, {"epsilon": 0.5, "delta": 0.75, "greedy_root": True}),
            ({"acceptance": "typical", "epsilon": 0.5}, LOSSLESS, {"epsilon": 0.5}),
        ],
    )
    def test_overrides(self, options, default, expected):
        if isinstance(expected, dict):
            expected = AcceptanceConfig(mode="typical", **expected)
        found = RequestConfig.from_extra_args({"medusa": options}, default)
        assert found == RequestConfig(**expected.model_dump())

    @pytest.mark.parametrize("default", [AcceptanceConfig(), TYPICAL])
    def test_a_limit_of_drafts_keeps_the_rule(self, default):
        for options in ({"max_draft_tokens": 0}, '{"max_draft_tokens": 0}'):
            found = RequestConfig.from_extra_args({"medusa": options}, default)
            assert found == RequestConfig(**default.model_dump(), max_draft_tokens=0)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (7, r"extra_args\[\"medusa\"\] is 7; use a dict"),
            ("[1]", r"extra_args\[\"medusa\"\] is \[1\]; use a dict"),
            ("", r"extra_args\[\"medusa\"\] is ''; use a dict"),
            ("{broken", r"extra_args\[\"medusa\"\] is '{broken'; use a dict"),
            pytest.param('{"a":' + "[" * 30_000, "use a dict", id="nested"),
            pytest.param('{"epsilon": ' + "1" * 5000 + "}", "use a dict", id="digits"),
            pytest.param({"epsilon": 10**5000}, "is of type int, too large", id="int"),
            ("typcal", "acceptance is 'typcal'"),
            ('{"epsilon": 5, "acceptance": "typical"}', "epsilon is 5"),
            ({"tree": [[0]]}, "'tree' is unknown; allowed: acceptance"),
            ({"acceptance": "typcal"}, "acceptance is 'typcal'"),
            ({"epsilon": 0.5}, "has no effect in lossless mode"),
            ({"acceptance": "typical", "epsilon": 5}, "epsilon is 5"),
            ({"mode": "typical"}, "'mode' is unknown; its name is .acceptance."),
            ({"max_draft_tokens": -1}, "max_draft_tokens is -1; use an integer of 0 or more"),
            ({"max_draft_tokens": True}, "max_draft_tokens is True; use an integer"),
            ({"max_draft_tokens": "2"}, "max_draft_tokens is '2'; use an integer"),
            ({"max_drafts": 2}, "'max_drafts' is unknown .did you mean 'max_draft_tokens'"),
        ],
    )
    def test_refusals(self, options, words):
        with pytest.raises(MedusaConfigError, match=words):
            RequestConfig.from_extra_args({"medusa": options}, AcceptanceConfig())

    @pytest.mark.parametrize("key", ["Medusa", "max_draft_tokens", "acceptance"])
    def test_misplaced_options(self, key):
        with pytest.raises(MedusaConfigError, match=f"has '{key}'; the options are in .medusa."):
            RequestConfig.from_extra_args({key: 0}, AcceptanceConfig())


class TestTree:
    def test_the_user_overrides_the_heads_and_these_the_default(self):
        assert resolve_tree({"chain": 2}, [[0], [1]], 3, 100) == TokenTree.chain(2)
        assert resolve_tree(None, [[0], [1]], 3, 100).paths == ((0,), (1,))
        assert resolve_tree(None, None, 4, 100) == DEFAULT_TREE
        assert resolve_tree(None) == DEFAULT_TREE

    def test_the_default_is_truncated_to_heads_and_vocabulary(self):
        assert resolve_tree(None, None, 2, 100) == DEFAULT_TREE.cut(max_depth=2)
        assert resolve_tree(None, None, 1, 2).paths == ((0,), (1,))

    @given(st.integers(1, 70))
    def test_the_cap_is_a_prefix(self, cap):
        tree = load_preset("mc_sim_7b_63")
        capped = resolve_tree("mc_sim_7b_63", max_draft_tokens=cap)
        assert capped.num_draft_tokens == min(cap, 63)
        assert capped == tree.prefix(cap + 1)

    def test_only_nodes_within_the_cap_must_fit(self):
        assert resolve_tree({"chain": 9}, None, 3, 100, 3) == TokenTree.chain(3)

    @pytest.mark.parametrize("num_heads", [1, 2, 3])
    def test_too_deep_names_the_path_and_a_tree_that_fits(self, num_heads):
        with pytest.raises(MedusaConfigError) as caught:
            resolve_tree("mc_sim_7b_63", None, num_heads, 100)
        text = str(caught.value)
        assert "('mc_sim_7b_63') can't be used. Its path [0, 0, 0, 0] has depth 4" in text
        assert f"there are {num_heads} heads" in text
        for remedy in ({"dense": [4, 3, 2][:num_heads]}, {"chain": num_heads}):
            assert json.dumps(remedy) in text
            resolve_tree(remedy, None, num_heads, 100)

    def test_bounds_are_exact(self):
        assert resolve_tree([[0], [7]], None, 1, 8).num_nodes == 3
        with pytest.raises(MedusaConfigError, match=r"\[7\] uses rank 7, .* 7 tokens.* up to 6"):
            resolve_tree([[0], [7]], None, 1, 7)
        assert resolve_tree({"chain": 3}, None, 3).max_depth == 3
        with pytest.raises(MedusaConfigError, match="depth 3, but there are 2 heads"):
            resolve_tree({"chain": 3}, None, 2)

    def test_an_invalid_tree_of_the_heads_is_attributed(self):
        with pytest.raises(MedusaConfigError, match=r"heads' own config can't.*Set the option"):
            resolve_tree(None, [[0, 0]], 3, 100)
        with pytest.raises(MedusaConfigError, match=r"heads' own config \('zephyr_stage2'\)"):
            resolve_tree(None, "zephyr_stage2", 2, 100)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("mc_sim_7b_64",), r"can't be used. There is no preset .*did you mean"),
            ((None, None, 0, 100), "0 heads over 100 tokens can't draft"),
        ],
    )
    def test_refusals(self, arguments, words):
        with pytest.raises(MedusaConfigError, match=words):
            resolve_tree(*arguments)


class TestMedusaConfig:
    def test_all_omitted(self):
        config = MedusaConfig.from_speculative_config({"method": "medusa"})
        assert config == MedusaConfig()
        assert (config.model, config.tree, config.num_speculative_tokens) == (None, None, None)
        assert config.acceptance == AcceptanceConfig()

    def test_all_given(self):
        given = {
            "method": "medusa", "model": Path("some/heads"), "revision": "main",
            "tree": [(0,), (0, 1)], "acceptance": {"mode": "typical", "epsilon": 0.5},
            "num_speculative_tokens": 5,
        }  # fmt: skip
        before = copy.deepcopy(given)
        config = MedusaConfig.from_speculative_config(given)
        assert given == before, "the user's dict is unchanged"
        assert config.model == str(Path("some/heads"))
        assert config.tree == [[0], [0, 1]]
        assert config.acceptance == AcceptanceConfig(mode="typical", epsilon=0.5)
        assert config.num_speculative_tokens == 5

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"modle": "x"}, r"'modle' is unknown \(did you mean 'model'\?\); allowed: model, re"),
            ({"draft_tensor_parallel_size": 1}, "'draft_tensor_parallel_size' is unknown; allowe"),
            ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; use an integer from 1"),
            ({"num_speculative_tokens": True}, "is True; use an integer"),
            ({"model": ""}, "model is ''; use the folder or hub name"),
            ({"tree": 3}, "tree is 3; use a preset name"),
            ({"tree": {1, 2}}, r"tree is \{1, 2\}; use .* plain JSON"),
            ({"tree": [object()]}, "plain JSON"),
            ({"tree": "dynamic"}, "tree is 'dynamic', which is only for EAGLE and MTP.* omit it"),
            ({"tree": {"width": 4, "depth": 3}}, "'width': 4.* which is only for EAGLE and MTP"),
            *[
                ({"budget": wrong}, r"^The \S+ option budget is [^;]*; use [^.]*\.$")
                for wrong in (0, 256, True, 1.5, "7", [], {}, {"max_rows": 8, "more": 1})
            ],
            *[  # one row has no room for a draft
                ({"budget": {"max_rows": rows}}, "option budget is [^;]*; use ")
                for rows in (0, 1, "8", True)
            ],
            ({"budget": 7, "tree": [[0]]}, 'budget is 7, .* a static "tree" is set too'),
            ({"lookup": True, "tree": [[0]]}, "static.*omit one of them"),
            ({"lookup": True, "revision": "main"}, '"model".*no heads|no heads.*"model"'),
            ({"lookup": 3}, "lookup is 3.*true or false"),
            ({"acceptance": "typcal"}, "Medusa acceptance mode is 'typcal'"),
            ({"acceptance": {"mode": "typical", "delta": 5}}, "Medusa acceptance delta is 5"),
        ],
    )
    def test_refusals(self, options, words):
        with pytest.raises(MedusaConfigError, match=words):
            MedusaConfig.from_speculative_config(options)


def test_compiled_models_are_reused_on_cpus(monkeypatch):
    """vLLM 0.32 can't load what it compiles ahead of time there; a user's own setting stays."""
    torch = pytest.importorskip("torch")
    name = "VLLM_USE_AOT_COMPILE"
    for gpu, user, expected in ((None, None, "0"), (None, "1", "1"), ("cuda", None, None)):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=gpu: found)
        monkeypatch.setattr(os, "environ", {} if user is None else {name: user})
        reuse_compiled_models()
        assert os.environ.get(name) == expected
