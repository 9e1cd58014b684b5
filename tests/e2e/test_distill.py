"""A real target generates conversations, some with both sides; its spans are its argmax.

Its words are single tokens, so its answers have the same tokens in the next turn's prompt.
Sometimes, however, it generates a token without text, and its conversation must be split into two
records.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat import CHATML
from support.models import VOCAB, save_model

from vllm_medusa.config import run_engines_in_this_process
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.engine import Sampling, VllmEngine
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.offline.records import Record, load_records
from vllm_medusa.training.distill import Plan

pytestmark = pytest.mark.engine

END, START = 1, 2
TALKS = [Prompt(i, i + 1, f"t{i}", turns=(f"w{9 + i} w7", "w30", f"w{40 + i}")) for i in range(8)]


def save_talkative_llama(folder: Path) -> str:
    """A random Llama whose tokens are words, and which often ends its turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<|im_end|>", "<|im_start|>", "user", "assistant"]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    ).save_pretrained(folder)

    def tune(model: Any) -> None:
        model.lm_head.weight[END] *= 3.0
        model.lm_head.weight[START] *= 1.5

    return save_model(folder, "Llama", tune=tune)


def records(engine: VllmEngine, plan: Plan, done: set[int], batch: int) -> list[dict[str, Any]]:
    results = run_batch(
        plan.slots(TALKS, done), engine, concurrency=batch, seed=plan.seed, session=plan.session
    )
    return [record for result in results for record in plan.records(result)]


def test_spans_are_the_targets_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = save_talkative_llama(tmp_path / "target")
    run_engines_in_this_process()
    settings = {
        "model": target,
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
    }
    engine = VllmEngine(settings, Sampling(max_tokens=24), seeded=True)
    try:
        plan = Plan(samples=3, temperatures=(0.0, 0.7, 1.0), seed=3, turns=3)
        whole = records(engine, plan, set(), batch=24)
        finished = {r["index"] for r in whole[::3]}
        resumed = records(engine, plan, finished, batch=5)
        both = Plan(samples=2, temperatures=(0.0,), turns=5, tokenizer=engine.llm.get_tokenizer())
        talked = records(engine, both, set(), batch=6)
        tokenizer = engine.llm.get_tokenizer()
    finally:
        engine.close()

    slots = {index // 3 for index in finished if index % 3 == 0}
    expected = {r["index"]: r for r in whole if r["index"] // 3 not in slots}
    assert {r["index"]: r for r in resumed} == expected
    assert len({tuple(r["token_ids"]) for r in whole}) > 20
    assert any(len(r["generated"]) == 3 for r in whole), "whole conversations"
    assert any(r["index"] % 3 for r in whole), "some were split"
    assert any(len(r["generated"]) > 1 for r in talked)

    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in whole))
    read, bad = load_records(path, vocab_size=VOCAB)
    assert not bad
    model = AutoModelForCausalLM.from_pretrained(target)
    greedy = [r for r in read if r.temperature == 0]
    path.write_text("".join(json.dumps(r) + "\n" for r in talked))
    greedy += load_records(path, vocab_size=VOCAB)[0]
    checked = sum(in_its_own_words(model, record) for record in greedy)
    assert checked == sum(r.num_generated for r in greedy) > 300
    prompts = [outside(tokenizer, record) for record in greedy]
    assert all(text.count("<|im_start|> assistant") >= 1 for text in prompts)


def in_its_own_words(model: Any, record: Record) -> int:
    """Tokens in the spans that are the target's argmax; a span that is off by one has fewer."""
    ids = torch.tensor([record.token_ids])
    with torch.no_grad():
        best = model(ids).logits[0].argmax(-1).tolist()
    for start, end in record.generated:
        assert record.token_ids[start - 1] == 4, "a span follows the header of an assistant turn"
        assert END not in record.token_ids[start : end - 1]
    return sum(
        best[place - 1] == record.token_ids[place]
        for start, end in record.generated
        for place in range(start, end)
    )


def outside(tokenizer: Any, record: Record) -> str:
    inside = {place for start, end in record.generated for place in range(start, end)}
    return str(tokenizer.decode([t for p, t in enumerate(record.token_ids) if p not in inside]))
