"""Forms of the tree option; the published trees and the default."""

import json
from importlib import resources
from pathlib import Path

import pytest

from vllm_medusa.tree.forms import read_tree
from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset, preset_names
from vllm_medusa.tree.topology import TokenTree, TreeError

SMALL = TokenTree.from_paths([[0], [0, 0], [1]])


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        ("mc_sim_7b_63", load_preset("mc_sim_7b_63")),
        ({"preset": "mc_sim_7b_63"}, load_preset("mc_sim_7b_63")),
        ([[0], [0, 0], [1]], SMALL),
        (((0,), (0, 0), (1,)), SMALL),
        ({"paths": [[0], [0, 0], [1]]}, SMALL),
        ({"tree": [[0], [0, 0], [1]], "source": "a note"}, SMALL),
        ({"dense": [4, 3, 2]}, TokenTree.dense([4, 3, 2])),
        ({"chain": 4}, TokenTree.chain(4)),
        (' {"chain": 4}', TokenTree.chain(4)),
        ("[[0], [0, 0], [1]]", SMALL),
    ],
)
def test_forms(value, tree):
    assert read_tree(value) == tree


@pytest.mark.parametrize("name", ["tree.json", "tree.txt"])
def test_files(tmp_path, name):
    file, paths = tmp_path / name, [[0], [0, 0], [1]]
    for content in (paths, {"paths": paths, "source": "a"}, {"tree": paths, "source": "b"}):
        file.write_text(json.dumps(content))
        assert read_tree(file) == read_tree(str(file)) == SMALL


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mc_sim_7b_64", r"did you mean 'mc_sim_7b_63'\?\). Presets: mc_sim_7b_63, vic"),
        ("missing.json", "'missing.json' can't be read .*No such file.*; use a preset name"),
        (Path("missing"), "'missing' can't be read"),
        ("/", "'/' can't be read .*directory"),
        ("", "no preset or file ''"),
        ("[[0], [", "The text is not JSON"),
        (None, "The tree is None; use a preset name"),
        (3, "The tree is 3; use a preset name"),
        ({}, "has no tree; use exactly one of"),
        ({"source": "a"}, "has no tree"),
        ({"dense": [2], "chain": 2}, "has dense and chain; use exactly one of"),
        ({"dens": [2]}, r"unknown key 'dens' \(did you mean 'dense'\?\); allowed: paths"),
        ({"paths": None}, "A tree is a list of paths"),
        ({"preset": ["mc"]}, "There is no preset"),
        ([0, 1], "Path 0 of the tree is 0"),
    ],
)
def test_invalid_forms_are_refused(value, words):
    with pytest.raises(TreeError, match=words):
        read_tree(value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[[0], [0]]", "listed twice"),
        (b"[[0],", "not JSON"),
        (b"3", "The JSON is 3"),
        (b'"mc_sim_7b_63"', "The JSON is 'mc_sim_7b_63'"),
    ],
)
def test_an_invalid_file_is_named(tmp_path, content, words):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(TreeError, match=rf"In the file '.*bad.json': .*{words}"):
        read_tree(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TreeError, match="can't be read"):
        read_tree(file)


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


@pytest.mark.parametrize(("num_heads", "drafts"), [(1, 5), (2, 11), (3, 13), (4, 14), (5, 14)])
def test_the_default_fits_any_number_of_heads(num_heads, drafts):
    tree = DEFAULT_TREE.cut(max_depth=num_heads)
    assert tree.num_draft_tokens == drafts
    assert tree.max_depth == min(num_heads, 4)
    assert TokenTree.from_paths(tree.paths) == tree
