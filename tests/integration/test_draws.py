"""The oracle's truncation and sampling against vLLM's own code, token for token."""

import pytest
import torch

from vllm_medusa.sampler import draw_exponential, draw_splitmix, truncate_logits


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (40, 0.9), (7, 0.3)])
def test_equals_vllm_s_cpu_sampler(
    top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this is not a CPU build of vLLM")
    current_platform.import_kernels()
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    rows, vocab = 64, 1000
    torch.manual_seed(top_k)
    logits = 3 * torch.randn(rows, vocab)
    k = torch.full((rows,), top_k, dtype=torch.int32) if top_k else None
    p = torch.full((rows,), top_p) if top_p < 1 else None
    cut = truncate_logits(logits, top_k, top_p)
    if k is not None or p is not None:
        theirs = ops.apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
        assert torch.equal(cut, theirs)

    def generators() -> dict[int, torch.Generator]:
        return {i: torch.Generator().manual_seed(i) for i in range(rows)}

    native = ops.random_sample(cut.softmax(-1), generators())
    ours = torch.stack([draw_exponential(cut[i], g) for i, g in generators().items()])
    assert torch.equal(ours, native)
    stock = ops.TopKTopPSampler("raw_logprobs")
    if stock.forward == stock.forward_cpu:
        theirs, _ = stock(logits.clone(), generators(), k, p)
        ours = torch.stack([draw_splitmix(cut[i], g) for i, g in generators().items()])
        assert torch.equal(ours, theirs)
        from vllm_medusa.integration.v1 import sampler

        fast = sampler.FastDraws("raw_logprobs")
        for decided in (True, False):
            if not decided:  # all left to vLLM's kernel
                monkeypatch.setattr(sampler, "gumbel_argmax", lambda _, seeds: seeds * 0 - 1)
            ours, _ = fast(logits.clone(), generators(), k, p)
            assert torch.equal(ours, theirs)
        draws = []
        for each in (stock, fast):  # all but one request use the default generator
            torch.manual_seed(7)
            draws.append(each(logits.clone(), {0: generators()[0]}, k, p)[0])
        assert torch.equal(*draws)
