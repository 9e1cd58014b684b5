import pytest


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The config of a target that is never loaded."""
    pytest.importorskip("vllm")
    from support.triton_steps import save_target

    return str(save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def make_builder(target, random_heads):
    """A new metadata builder for the Triton attention, optionally of a longer model."""
    from support.triton_steps import make_builder, make_config

    def made(heads=random_heads, length=None, dynamic=False):
        config = make_config(target, heads, dynamic)
        config.model_config.max_model_len = length or config.model_config.max_model_len
        return make_builder(config)

    return made
