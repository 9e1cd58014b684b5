import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.pictures import _layout, check_picture, draw_tree
from vllm_medusa.files import FileRefused
from vllm_medusa.tree import load_preset


def test_no_two_nodes_share_a_place():
    places = _layout(load_preset("mc_sim_7b_63").paths)
    assert len(set(places.values())) == len(places) == 64
    for node, (x, y) in places.items():
        assert y == -len(node)
        below = [places[other][0] for other in places if other and other[:-1] == node]
        assert not below or min(below) <= x <= max(below)
    for depth in range(5):
        level = sorted(x for x, y in places.values() if y == -depth)
        assert all(b - a >= 0.99 for a, b in itertools.pairwise(level))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_written(tmp_path, suffix):
    paths = load_preset("mc_sim_7b_63").paths[:9]
    chances = {(): 1.0} | {path: 0.5 ** (1 + sum(path) + len(path)) for path in paths}
    file = tmp_path / f"tree{suffix}"
    draw_tree(file, paths, chances, "a title")
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    if suffix == ".svg":
        assert file.read_text().rstrip().endswith("</svg>")
        return
    with Image.open(file) as image:
        assert image.width > 500
        assert len(set(np.asarray(image.convert("L")).ravel().tolist())) > 20


def test_unsupported_picture_formats_are_refused_first(tmp_path):
    with pytest.raises(CalibrationError, match=r"\.png, \.svg"):
        check_picture(Path("tree.jpeg2"))
    with pytest.raises(FileRefused, match=r"no folder .*nowhere"):
        check_picture(tmp_path / "nowhere" / "tree.png")
