import pytest
import torch
from support.random_heads import HIDDEN, VOCAB


@pytest.fixture
def hidden():
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def target_lm_head():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(10))
