"""On the test model's target and heads: walks predict decoding exactly, step by step."""

from types import SimpleNamespace

import pytest
import torch
from support.assets import HEADS, HIDDEN, TARGET, VOCAB, code_prompts
from transformers import AutoModelForCausalLM

from vllm_medusa.calibration.collect import collect
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.decode import decode
from vllm_medusa.files import Run
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.training.target import Target
from vllm_medusa.tree import TokenTree

TREE = TokenTree.dense([4, 3, 2, 1])
TOKENS = 60


@pytest.fixture(scope="module")
def trained():
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    heads, _ = load_heads(HEADS, hidden_size=HIDDEN, vocab_size=VOCAB, dtype=torch.float32)
    return model, heads


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_walks_of_the_targets_own_text_equal_decoding(trained, tmp_path, temperature):
    model, heads = trained
    texts, accepted = [], []
    for number, ids in enumerate(code_prompts(0, 3)):
        generator = torch.Generator().manual_seed(number)
        options = {"temperature": temperature, "generator": generator, "eos_token_id": 1}
        result = decode(model, heads, TREE, torch.tensor(ids), TOKENS, **options)
        tokens = (*ids, *result.token_ids)
        span = (len(ids), len(tokens))
        texts.append(SimpleNamespace(token_ids=tokens, generated=(span,), temperature=temperature))
        texts[-1].prompt_key = str(number)
        accepted.append(result.accepted_per_step)

    with Run(tmp_path / "part", {}, of=tmp_path) as run:
        observations, _ = collect(texts, heads, Target(model), run)
    compared = total = 0
    order = sorted(range(len(texts)), key=lambda text: -len(texts[text].token_ids))
    for rows, steps in zip(observations.texts(), [accepted[text] for text in order], strict=True):
        walks = Walks([rows], TREE.paths)
        walked = (walks.jumps[walks.visited()] - 1).tolist()
        assert walked == steps[: len(walked)]
        assert len(steps) - len(walked) <= heads.num_heads, "only where labels ran out"
        compared += len(walked)
        total += sum(walked)
    assert compared > 60 and total > 15, "too few steps for a comparison"
