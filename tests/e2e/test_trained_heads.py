"""All drafts of heads overfitted to a text are accepted in a real vLLM."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.engines import complete, engine, greedy, medusa
from support.models import save_model
from support.overfit import PROMPT, K, overfit

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.training.target import Target

pytestmark = pytest.mark.engine


def test_tau_is_maximal_on_a_memorized_text(tmp_path: Path) -> None:
    path = save_model(tmp_path / "target", "Llama", tie_word_embeddings=True)
    target = Target.load(path)
    record, made = overfit(target, tmp_path / "run", draft_vocab=64)
    with torch.no_grad():
        for parameter in made.method.heads.parameters():
            parameter.copy_(parameter.bfloat16())
    assert [top[0] for top in made.method.measure()["heldout"]["top"]] == [1.0] * K
    save_heads(tmp_path / "heads", made.method.heads.bfloat16())
    steps = 10
    count = 1 + steps * (1 + K)  # the prompt's own token, then whole steps
    chain = [[0] * depth for depth in range(1, K + 1)]
    config = medusa(str(tmp_path / "heads"), chain)
    assert "token_map" in load_file(tmp_path / "heads" / "model.safetensors")
    with engine(path, config, max_model_len=128) as llm:
        (found,) = complete(llm, [list(PROMPT)], greedy(count))
    assert list(found.token_ids) == list(record.token_ids[len(PROMPT) :][:count])
    assert list(found.accepted) == [K] * steps
