"""The model shared by tests: it loads, its parts match, it is small, and the heads predict."""

import json
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_medusa.heads import load_heads, peek_heads
from vllm_medusa.tree import TokenTree

ASSETS = Path(__file__).parents[2] / "tests" / "assets"

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
    loaded, _ = load_heads(ASSETS / "heads", **sizes, **options)
    loaded.store_lm_head(target().lm_head.weight)
    return loaded


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


def test_heads_and_tree_fit_the_target():
    info = peek_heads(ASSETS / "heads")
    config = json.loads((ASSETS / "target" / "config.json").read_text())
    assert (info.hidden_size, info.vocab_size) == (config["hidden_size"], config["vocab_size"])
    assert info.num_heads >= 4 and info.num_lm_heads == 0
    tree = TokenTree.from_paths(info.tree)
    assert 8 <= tree.num_draft_tokens <= 16
    assert 2 <= tree.max_depth <= info.num_heads


def test_each_head_predicts_unseen_text():
    logits, labels = unseen()
    right = (logits.argmax(-1) == labels).float().mean(-1)  # [K + 1]
    floors = torch.tensor([0.45, 0.20, 0.13, 0.08, 0.06, 0.045])
    assert bool((right > floors[: len(right)]).all()), right.tolist()


def test_the_heads_are_better_than_the_lm_head():
    logits, labels = unseen()
    untrained = (logits[0].argmax(-1) == labels[1:]).float().mean(-1)  # what zero blocks predict
    trained = (logits[1:].argmax(-1) == labels[1:]).float().mean(-1)
    assert bool((trained > untrained + 0.05).all()), (trained.tolist(), untrained.tolist())
