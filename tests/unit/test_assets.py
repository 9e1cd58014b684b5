"""The model that tests share: it loads, fits together, is small, and the heads can predict."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_medusa.heads import load_heads, peek_heads
from vllm_medusa.tree import TokenTree

ASSETS = Path(__file__).parents[2] / "tests" / "assets"
LIMIT = 12_000_000  # bytes

# Written for this test, so neither the target nor the heads were trained on it.
UNSEEN = (Path(__file__).parent / "unseen.txt").read_text()


@cache
def target():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "target")


@cache
def heads():
    config, options = target().config, {"dtype": torch.float32}
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    return load_heads(ASSETS / "heads", **sizes, **options, lm_head_weight=target().lm_head.weight)[
        0
    ]


@cache
def unseen():
    """Token ids [T] of the text and, for LM head and heads, whether each was right [K + 1, T]."""
    ids = tokenizer()(UNSEEN, return_tensors="pt").input_ids[0]
    with torch.no_grad():
        hidden = target().model(ids[None]).last_hidden_state[0]  # [T, H]
        own = target().lm_head(hidden)[:, None]  # [T, 1, V]
        logits = torch.cat([own, heads().compute_logits(heads()(hidden))], dim=1)  # [T, K + 1, V]
    ahead = logits.shape[1]
    stop = len(ids) - ahead
    labels = torch.stack([ids[1 + k : 1 + k + stop] for k in range(ahead)])  # [K + 1, T - K - 1]
    return logits[:stop].transpose(0, 1), labels


def test_all_is_small_and_no_binary_but_safetensors():
    files = [p for p in ASSETS.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(path.stat().st_size for path in files) <= LIMIT
    assert {p.suffix for p in files} <= {".json", ".jsonl", ".safetensors"}


def test_stored_tensors_are_finite_bf16():
    for part in ("target", "heads"):
        for name, tensor in load_file(ASSETS / part / "model.safetensors").items():
            assert tensor.dtype == torch.bfloat16, (part, name)
            assert bool(tensor.isfinite().all()), (part, name)


def test_heads_are_made_for_the_target_and_their_tree_for_them():
    info = peek_heads(ASSETS / "heads")
    config = json.loads((ASSETS / "target" / "config.json").read_text())
    assert (info.hidden_size, info.vocab_size) == (config["hidden_size"], config["vocab_size"])
    assert info.num_heads >= 4 and info.num_lm_heads == 0
    tree = TokenTree.from_paths(info.tree)
    assert 8 <= tree.num_draft_tokens <= 16
    assert 2 <= tree.max_depth <= info.num_heads


def test_measured_figures_agree_with_each_other():
    document = json.loads((ASSETS / "heads" / "config.json").read_text())["medusa"]
    taus = document["tree_tokens_per_step"]
    assert len(taus) == len(document["tree"])
    assert taus == sorted(taus), "every node of the tree adds to it"
    for kind in ("head_accuracies_sampled", "head_accuracies_source"):
        firsts = [ranks[0] for ranks in document[kind]]
        assert firsts == sorted(firsts, reverse=True), "further ahead is harder"
        assert all(0 < sum(ranks) < 1 for ranks in document[kind])
    assert document["tree"][0] == [0]
    # Decoding with one node: after a hit the next step stands two tokens on, where it is as likely.
    assert taus[0] == pytest.approx(1 + document["head_accuracies_sampled"][0][0], abs=0.06)


def test_the_target_knows_python():
    logits, labels = unseen()
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0])
    assert loss < 2.4  # nats; a uniform guess has 8.3


def test_each_head_predicts_unseen_text():
    logits, labels = unseen()
    right = (logits.argmax(-1) == labels).float().mean(-1)  # [K + 1]
    floors = torch.tensor([0.45, 0.20, 0.13, 0.08, 0.06, 0.045])
    assert bool((right > floors[: len(right)]).all()), right.tolist()


def test_the_heads_know_more_than_the_lm_head_alone():
    logits, labels = unseen()
    untrained = (logits[0].argmax(-1) == labels[1:]).float().mean(-1)  # what zero blocks predict
    trained = (logits[1:].argmax(-1) == labels[1:]).float().mean(-1)
    assert bool((trained > untrained + 0.05).all()), (trained.tolist(), untrained.tolist())


def test_prompts_are_code_after_the_start_token():
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert 24 <= len(records) <= 40
    assert len({record["id"] for record in records}) == len(records)
    assert len({record["prompt"] for record in records}) == len(records)
    for record in records:
        ids = tokenizer()(record["prompt"]).input_ids
        assert ids[0] == tokenizer().bos_token_id == target().config.bos_token_id
        assert ids.count(tokenizer().bos_token_id) == 1, "the tokenizer adds none of its own"
        assert 16 <= len(ids) <= 128, record["id"]
        assert not tokenizer().decode(ids[1:2])[0].isspace(), "starts with code"
