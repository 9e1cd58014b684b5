import pytest


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The config of a target that is never loaded."""
    pytest.importorskip("vllm")
    from support.models import save_config

    return save_config(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_builder(target, random_heads):
    """A new metadata builder for the Triton attention, optionally of a longer model."""
    from support.triton_steps import NODES, make_builder, make_config

    def made(heads=random_heads, length=None, dynamic=False):
        config = make_config(target, heads, NODES - 1 if dynamic else None)
        config.model_config.max_model_len = length or config.model_config.max_model_len
        return make_builder(config)

    return made
