import pytest
import torch
from support import random_heads as made
from support.random_heads import HIDDEN, VOCAB


@pytest.fixture(name="random_heads")
def _random_heads():
    return made.random_heads


@pytest.fixture(name="write")
def _write():
    return made.write


@pytest.fixture(name="write_sharded")
def _write_sharded():
    return made.write_sharded


@pytest.fixture
def hidden():
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def target_lm_head():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(10))
