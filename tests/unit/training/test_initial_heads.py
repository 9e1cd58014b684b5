"""Untrained heads, and the LM head over a draft vocabulary."""

import torch
from support.models import save_model

from vllm_medusa.training.initial_heads import new_heads, target_lm_head
from vllm_medusa.training.target import Target


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
