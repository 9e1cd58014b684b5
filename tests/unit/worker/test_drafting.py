"""Which form of heads and proposal a device gets; that engines draft with them is in tests/v2."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm_medusa import proposer
from vllm_medusa.heads import MedusaHeads, PackedHeads
from vllm_medusa.proposer import sharded
from vllm_medusa.worker import drafting
from vllm_medusa.worker.drafting import Proposal, arranged

HIDDEN, VOCAB = 16, 40
CUDA = torch.device("cuda")


def random_heads() -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(3, 2, HIDDEN, VOCAB)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


@pytest.mark.parametrize("rows", [None, slice(8, 24)])
def test_heads(rows: slice | None) -> None:
    """Both forms give one rank's columns; on a GPU a layer of all heads is one product."""
    hidden = torch.randn(5, HIDDEN)
    heads = random_heads()
    wanted = heads.compute_logits(heads(hidden))[..., rows or slice(None)]
    packed, stacked = arranged(heads, torch.device("cpu"), rows), arranged(heads, CUDA, rows)
    assert isinstance(packed, PackedHeads) and stacked is heads
    assert not any(parameter.requires_grad for parameter in stacked.parameters())
    for made in (packed, stacked):
        found = made.compute_logits(made(hidden))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vllm_medusa.proposer import kernel

    for found, there in ((False, proposer.propose), (True, kernel.propose)):
        monkeypatch.setattr(drafting, "uses_kernel", lambda device_type, found=found: found)
        proposal = Proposal.of(CUDA)
        assert proposal.whole is there
        home = kernel if found else sharded
        assert proposal.sharded is home.propose_sharded
