"""The published trees and the default."""

import json
from importlib import resources

import pytest

from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset, preset_names
from vllm_medusa.tree.topology import TokenTree, TreeError


def test_all_published_trees_exist():
    assert len(preset_names()) == 9
    assert {"mc_sim_7b_63", "vicuna_7b_stage2", "vicuna_7b_stage1_ablation"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_keeps_the_order_of_its_file(name):
    file = resources.files("vllm_medusa.tree") / "presets" / f"{name}.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    tree = load_preset(name)
    assert tree.to_lists() == data["paths"]
    assert "FasterDecoding/Medusa" in data["source"]
    assert tree.num_draft_tokens == 63
    assert tree.max_depth in (3, 4)
    assert tree.paths[0] == (0,)


def test_first_nodes_of_the_best_known_tree():
    assert load_preset("mc_sim_7b_63").prefix(6).paths == ((0,), (0, 0), (1,), (0, 1), (2,))


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(TreeError, match="There is no preset 'mc'; presets: mc_sim_7b_63, vicuna"):
        load_preset("mc")


def test_the_default_is_common_to_the_published_trees():
    """As its docstring states: the paths of lowest mean position, then one more head."""
    presets = [load_preset(name).paths for name in preset_names()]
    everything = {path for paths in presets for path in paths}

    def mean_position(path):
        return sum(paths.index(path) if path in paths else len(paths) for paths in presets) / len(
            presets
        )

    best = sorted(everything, key=mean_position)
    assert DEFAULT_TREE.paths == (*best[:13], (0, 0, 0, 0))
    assert [mean_position(path) for path in best[:14]] == sorted(map(mean_position, best[:14]))


@pytest.mark.parametrize(("num_heads", "drafts"), [(1, 5), (2, 11), (3, 13), (4, 14), (5, 14)])
def test_the_default_fits_any_number_of_heads(num_heads, drafts):
    tree = DEFAULT_TREE.cut(max_depth=num_heads)
    assert tree.num_draft_tokens == drafts
    assert tree.max_depth == min(num_heads, 4)
    assert TokenTree.from_paths(tree.paths) == tree
