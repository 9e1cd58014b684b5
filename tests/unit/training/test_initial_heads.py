"""The draft vocabulary, and the LM head over it."""

import torch
from support.models import save_model

from vllm_medusa.offline.records import Record
from vllm_medusa.training.initial_heads import frequent_tokens, new_heads, target_lm_head
from vllm_medusa.training.target import Target


def record(ids: tuple[int, ...], *spans: tuple[int, int]) -> Record:
    return Record(0, 1, "a", ids, spans)


def test_the_commonest_generated_tokens_are_kept():
    records = [record((9, 9, 9, 9, 3, 3, 5), (4, 7)), record((7, 5, 6), (1, 2), (2, 3))]
    assert frequent_tokens(records, 1, 12).tolist() == [3]  # of 3 and 5, twice each
    assert frequent_tokens(records, 3, 12).tolist() == [3, 5, 6]
    assert frequent_tokens(records, 5, 12).tolist() == [0, 1, 3, 5, 6]  # no prompt's 9 or 7
    assert len(frequent_tokens(records, 50, 12)) == 12


def test_the_draft_lm_head_is_the_targets_rows(tmp_path):
    path = save_model(tmp_path, "Gemma2", final_logit_softcapping=5.0, initializer_range=0.1)
    target = Target.load(path)
    states = torch.randn(3, 64)
    for token_map in (None, torch.tensor([7, 2, 400])):
        heads = new_heads(target, 1, 1, token_map=token_map)
        rows = target.lm_head_weight[slice(None) if token_map is None else token_map]
        wanted = target.shape_logits(torch.nn.functional.linear(states, rows))
        torch.testing.assert_close(target_lm_head(target, heads.token_map)(states), wanted)
        half = target_lm_head(target, heads.token_map, torch.bfloat16)(states)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), wanted, rtol=0.05, atol=0.05)


def test_own_lm_heads_carry_the_scale(tmp_path):
    path = save_model(tmp_path, "Granite", logits_scaling=8.0, head_dim=None)
    target = Target.load(path)
    heads, states = new_heads(target, 2, 1, lm_heads="own"), torch.randn(3, 64)
    logits = heads.compute_logits(heads(states))
    wanted = target.lm_head(states)[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
