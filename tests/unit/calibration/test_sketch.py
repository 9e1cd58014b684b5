from vllm_medusa.calibration.sketch import sketch_tree


def test_a_tree_as_text():
    chances = {(): 1.0, (0,): 0.612, (1,): 0.1, (0, 1): 0.05, (0, 2): 0.002, (0, 1, 0): 0}
    assert sketch_tree([(1,), (0,), (0, 2), (0, 1), (0, 1, 0)], chances) == [
        "root",
        "|- 0  61.2 %",
        "|  |- 1  5.0 %",
        "|  |  `- 0  0.0 %",
        "|  `- 2  0.2 %",
        "`- 1  10.0 %",
    ]
    assert sketch_tree([(0,)]) == ["root", "`- 0"]
