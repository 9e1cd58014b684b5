"""Grammars along branches, with xgrammar and real words: every node has its own state."""

import json
import random

import pytest

pytest.importorskip("vllm")
import numpy as np
import torch
import xgrammar as xgr
from support.assets import VOCAB, tokenizer
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_medusa.integration.scheduling.grammar import (
    FORCED,
    MIN_RUN_SURVIVAL,
    Candidates,
    Spelling,
    allows,
    choose,
    few_tokens,
    fill_masks,
    forced_run,
)

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "other"]}, "size": {"type": "integer"}},
    "required": ["kind", "size"],
}
TEXT = '{"kind": "other", "size": 12}'
WORDS = VOCAB // 32


@pytest.fixture(scope="module")
def compiler():
    return xgr.GrammarCompiler(xgr.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=VOCAB))


@pytest.fixture(scope="module")
def schema(compiler):
    return compiler.compile_json_schema(json.dumps(SCHEMA))


@pytest.fixture(params=range(4))
def drafted(request):
    """The tokens of an answer so far, and drafts of 40 nodes after them."""
    rng, text = random.Random(request.param), tokenizer().encode(TEXT, add_special_tokens=False)
    begun = text[: request.param * 3]
    return begun, random_drafts(rng, 40, text[len(begun) :])


@pytest.fixture
def spelling():
    return Spelling(tokenizer().convert_ids_to_tokens)


@pytest.fixture
def row():
    """A buffer for one mask."""
    return xgr.allocate_token_bitmask(1, VOCAB)


def at(compiled, tokens):
    """A grammar that has accepted ``tokens``; None if it rejects them."""
    grammar = XgrammarGrammar(
        vocab_size=VOCAB, matcher=xgr.GrammarMatcher(compiled, max_rollback_tokens=64), ctx=compiled
    )
    if grammar.validate_tokens(tokens) != tokens:
        return None
    grammar.accept_tokens("", tokens)
    return grammar


def mask_of(grammar):
    mask = xgr.allocate_token_bitmask(1, VOCAB)
    if not grammar.is_terminated():
        grammar.fill_bitmask(mask, 0)
    return mask[0]


def random_drafts(rng, num_nodes, text):
    """A tree in which some paths start like the text; siblings differ."""
    tokens, parents, paths, depth = [], [], {()}, [0]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens) + 1)
        token = text[depth[parent]] if rng.random() < 0.6 else rng.choice([*text, 3, 7])
        if (parent, token) not in paths and depth[parent] + 1 < len(text):
            paths.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
    return Candidates(tokens, parents, [0.5 / (1 + node) for node in range(num_nodes)])


def test_every_mask_is_the_mask_of_its_path(schema, drafted):
    begun, drafts = drafted
    grammar, masks = at(schema, begun), xgr.allocate_token_bitmask(50, VOCAB)
    root = masks[5] = mask_of(grammar)
    masks[6:46] = 7  # of an earlier step
    fill_masks(grammar, masks, 5, drafts.token_ids, drafts.parents)
    live = 0
    for node in range(1, 41):
        there = at(schema, begun + drafts.path(node))
        live += there is not None
        expected = torch.full_like(root, -1) if there is None else mask_of(there)
        assert torch.equal(masks[5 + node], expected)
    assert 2 < live < 40
    assert torch.equal(mask_of(grammar), root)  # its state is unchanged
    assert (masks[46:] == -1).all() and (masks[:5] == -1).all()


def test_only_allowed_drafts_are_chosen(schema, drafted, row, spelling):
    begun, drafts = drafted
    grammar = at(schema, begun)
    chosen = choose(grammar, drafts, 5, row, VOCAB, spelling, 0.85)
    found = {tuple(chosen.path(node)) for node in range(1, 1 + len(chosen.parents))}
    assert len(found) == len(chosen.parents)
    assert all(at(schema, [*begun, *path]) for path in found)
    given = {tuple(drafts.path(node)) for node in range(1, 41)}
    assert {path for path in given if len(path) <= 5 and at(schema, [*begun, *path])} <= found
    assert all(parent < node for node, parent in enumerate(chosen.parents, 1))
    assert chosen.survival == sorted(chosen.survival, reverse=True)
    assert max(len(path) for path in found) <= 5
    assert torch.equal(mask_of(grammar), mask_of(at(schema, begun)))


def test_forced_tokens_are_drafted_without_heads(compiler, row, spelling):
    """Up to the end token, after which there are no drafts."""
    compiled = compiler.compile_regex("return self")
    more = row, VOCAB, spelling, 0.85
    chosen = choose(at(compiled, []), Candidates([], []), 9, *more)
    best, node = [], 0
    while node in chosen.parents:
        node = 1 + chosen.parents.index(node)  # its most probable child
        best.append(chosen.token_ids[node - 1])
    assert tokenizer().decode(best) == "return self</s>"
    assert best[-1] == tokenizer().eos_token_id
    assert choose(at(compiled, best), Candidates([5], [0], [0.5]), 9, *more).token_ids == []
    assert choose(at(compiled, best[:-1]), Candidates([], []), 9, *more) == Candidates(
        best[-1:], [0], [1.0], [FORCED]
    )
    deep = choose(at(compiled, []), Candidates([], []), 1, *more, 2)  # deeper than the heads
    run = [token for token, kind in zip(deep.token_ids, deep.forced, strict=True) if kind]
    assert run == best[:2]
    longest = forced_run(at(compiled, []), 9, row, VOCAB, spelling, 0.99)
    assert tokenizer().decode(longest.token_ids) == "return self</s>", "it ends with the grammar"


@pytest.mark.parametrize("begun", [0, 3, 6])
@pytest.mark.parametrize(("longest", "depth"), [(0.85, 9), (0.85, 1), (0.45, 9), (0.1, 9)])
def test_a_forced_run_is_the_likeliest_path(schema, row, spelling, begun, longest, depth):
    text = tokenizer().encode(TEXT, add_special_tokens=False)[:begun]
    grammar = at(schema, text)
    run = forced_run(grammar, depth, row, VOCAB, spelling, longest)
    assert torch.equal(mask_of(grammar), mask_of(at(schema, text)))  # its state is unchanged
    assert 0 < len(run.token_ids) <= depth and at(schema, text + run.token_ids)
    assert run.parents == list(range(len(run.parents))) and all(run.forced)
    assert run.survival == sorted(run.survival, reverse=True)
    assert all(worth >= MIN_RUN_SURVIVAL for worth in run.survival[1:])


def test_small_sets_of_allowed_tokens_are_found():
    mask = torch.zeros(WORDS, dtype=torch.int32)
    mask[0], mask[3] = 1 << 4, -(1 << 31)
    assert few_tokens(mask.numpy(), VOCAB) == [4, 3 * 32 + 31]
    assert few_tokens(mask.numpy(), 127) == [4]
    assert allows(mask.numpy(), 127) and not allows(mask.numpy(), 126)
    assert not allows(torch.full_like(mask, -1).numpy(), -1)


@pytest.mark.parametrize("step", [1, 32], ids=["one word", "a word each"])
def test_up_to_16_allowed_tokens_are_few(step):
    mask = np.zeros(WORDS, dtype=np.uint32)
    tokens = [step * index for index in range(17)]
    for count, token in enumerate(tokens, 1):
        mask[token // 32] |= np.uint32(1 << token % 32)
        expected = tokens[:count] if count <= 16 else None
        assert few_tokens(mask.view(np.int32), VOCAB) == expected


def test_a_dead_end_has_no_drafts(compiler, spelling):
    """Stop tokens end an answer: if only they are allowed, there are no drafts."""
    compiled = compiler.compile_regex("no")
    stops = [token for token in range(VOCAB) if tokenizer().decode([token])[:1] == "n"]
    matcher = xgr.GrammarMatcher(compiled, override_stop_tokens=stops, max_rollback_tokens=64)
    grammar = XgrammarGrammar(vocab_size=VOCAB, matcher=matcher, ctx=compiled)
    mask = mask_of(grammar)[None]
    assert few_tokens(mask.numpy()[0], VOCAB) == []
    assert choose(
        grammar, Candidates([5, 6], [0, 0], [0.5, 0.4]), 5, mask, VOCAB, spelling, 0.9
    ) == (Candidates([], [], []))
    assert forced_run(grammar, 5, mask, VOCAB, spelling, 0.9).token_ids == []
