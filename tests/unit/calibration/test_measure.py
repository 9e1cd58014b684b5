"""On the test model's target and heads: what walks predict is what decoding does, step for step."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.observed import observed
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_medusa.calibration.collect import collect
from vllm_medusa.calibration.measure import Measured, measure, walked_by_prompt
from vllm_medusa.calibration.prompts import prompt_ids
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.decode import decode
from vllm_medusa.heads import load_heads
from vllm_medusa.offline.prompts import PromptError
from vllm_medusa.tree import TokenTree

ASSETS = Path(__file__).parents[3] / "tests" / "assets"
TREE = TokenTree.dense([4, 3, 2, 1])
TOKENS = 60


@pytest.fixture(scope="module")
def trained():
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    heads, _ = load_heads(ASSETS / "heads", hidden_size=256, vocab_size=4096, dtype=torch.float32)
    return model, heads


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_walks_of_the_targets_own_text_are_its_decoding(trained, tmp_path, temperature):
    model, heads = trained
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    texts, accepted = [], []
    for number, ids in enumerate(prompt_ids(ASSETS / "prompts.jsonl", tokenizer, 3)):
        generator = torch.Generator().manual_seed(number)
        options = {"temperature": temperature, "generator": generator, "eos_token_id": 1}
        result = decode(model, heads, TREE, torch.tensor(ids), TOKENS, **options)
        tokens = (*ids, *result.token_ids)
        span = (len(ids), len(tokens))
        texts.append(SimpleNamespace(token_ids=tokens, generated=(span,), temperature=temperature))
        texts[-1].prompt_key = str(number)
        accepted.append(result.accepted_per_step)

    def hidden_states(ids, mask):
        return model.model(ids, attention_mask=mask).last_hidden_state

    observations, _ = collect(
        texts, heads, hidden_states, model.get_output_embeddings(), tmp_path, end_tokens={1}
    )
    compared = total = 0
    for rows, steps in zip(observations.texts(), accepted, strict=True):
        walks = Walks([rows], TREE.paths)
        walked = (walks.jumps[walks.visited()] - 1).tolist()
        assert walked == steps[: len(walked)]
        assert len(steps) - len(walked) <= heads.num_heads, "only where labels ran out"
        compared += len(walked)
        total += sum(walked)
    assert compared > 60 and total > 15, "too little happened to tell"


def test_what_is_measured_is_what_the_oracle_counts(trained):
    model, heads = trained
    prompts = [[0, 45, 300, 12], [0, 882, 771, 290]]
    found = measure(
        model, heads, TREE, prompts, max_new_tokens=12, temperature=0.8, seed=5, samples=2
    )
    results = []
    for number, prompt in enumerate([0, 0, 1, 1]):
        generator = torch.Generator().manual_seed(5 + number)
        ids = torch.tensor(prompts[prompt])
        result = decode(model, heads, TREE, ids, 12, temperature=0.8, generator=generator)
        results.append(result.accepted_per_step)
    pairs = [results[0] + results[1], results[2] + results[3]]
    assert found == Measured(tuple(map(sum, pairs)), tuple(map(len, pairs)))


def test_walks_are_summed_by_prompt():
    right, wrong = [0, 0], [5, 5]
    ranks = [right, wrong, wrong, wrong, wrong, right, wrong]
    observations = observed(ranks, [2, 3, 2], prompts=np.array([0, 1, 0]))
    found = walked_by_prompt(observations, [(0,)])
    assert found == Measured((2, 0), (2, 3))


def test_tau_and_its_error():
    assert Measured((3, 1), (4, 2)).tau == pytest.approx(1 + 4 / 6)
    even = Measured((2, 4, 1), (4, 8, 2))
    assert even.tau == 1.5 and even.standard_error == 0
    assert Measured((3, 1), (2, 2)).standard_error == pytest.approx(math.sqrt(2 * 2) / 4)
    assert math.isnan(Measured((3,), (2,)).standard_error)
    assert math.isnan(Measured((0,), (0,)).tau)


def test_prompts_of_records_and_of_texts(tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [{"token_ids": [0, 5, 6, 7, 8], "generated": [[3, 5]]}] * 2
    rows.append({"token_ids": [0, 9, 6, 7], "generated": [[2, 3], [3, 4]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prompt_ids(path, None) == [[0, 5, 6], [0, 9]], "each once"
    assert prompt_ids(path, None, 1) == [[0, 5, 6]]
    path.write_text(json.dumps(rows[0]) + '\n{"token_ids": [1]}\n')
    with pytest.raises(PromptError, match="line 2"):
        prompt_ids(path, None)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    (tmp_path / "prompts.txt").write_text("def f(\nimport os\n")
    found = prompt_ids(tmp_path / "prompts.txt", tokenizer)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
    assert texts == ["def f(", "import os"]
