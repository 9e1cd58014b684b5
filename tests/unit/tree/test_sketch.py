from vllm_medusa.tree.sketch import sketch_tree


def test_a_tree_as_text():
    chances = {(): 1.0, (0,): 0.612, (1,): 0.1, (0, 1): 0.05}
    assert sketch_tree([(1,), (0,), (0, 2), (0, 1), (0, 1, 0)], chances) == [
        "root 1.00",
        "|- 0 0.61",
        "|  |- 1 0.05",
        "|  |  `- 0",
        "|  `- 2",
        "`- 1 0.10",
    ]
