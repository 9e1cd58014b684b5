"""The parts of demo/build.py that can be tested without training anything to the end."""

import argparse
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo.build import amount, main, scaled
from demo.corpus import BuildError, find_sources, rows, tokenize, training_texts
from demo.heads_stage import Rows, accuracies, head_losses, label_ranks
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.sampling import sample_rows
from demo.stages import Build
from demo.target_stage import learning_rate, row_order, train_target, train_tokenizer
from vllm_medusa.heads import MedusaHeads, load_heads

SMALL = CorpusRecipe(min_bytes=8, max_bytes=500, heldout_every=4)


def write_library(root, count=40):
    for index in range(count):
        path = root / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import os\ndef function_{index}(x):\n    return x + {index}\n")


def test_sources_do_not_depend_on_where_they_lie(tmp_path):
    for name in ("here", "there"):
        write_library(tmp_path / name)
    (tmp_path / "there" / "package0").rename(tmp_path / "there" / "renamed")
    here, there = (find_sources([tmp_path / name], SMALL) for name in ("here", "there"))
    assert [s.digest for s in here] == [s.digest for s in there]
    assert [s.text() for s in here] == [s.text() for s in there]
    assert 0 < sum(s.heldout for s in here) < len(here) / 2


def test_sources_skip_copies_packages_odd_sizes_and_other_encodings(tmp_path):
    write_library(tmp_path, 4)
    (tmp_path / "copy.py").write_text((tmp_path / "package0" / "module0.py").read_text())
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "table.py").write_text("x = 1\n" * 100)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\xe9\xe9\xe9\xe9\xe9\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("import something\n")
    assert len(find_sources([tmp_path], SMALL)) == 4
    both = find_sources([tmp_path, tmp_path / "site-packages"], SMALL)
    assert len(both) == 5
    assert both[-1].path.name == "other.py", "roots keep their order"


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(BuildError, match="nowhere: no such folder"):
        find_sources([tmp_path / "nowhere"], SMALL)
    with pytest.raises(BuildError, match=r"no \.py file of 8\.\.500 bytes"):
        find_sources([tmp_path], SMALL)


def test_tokens_are_split_bounded_and_reused(tmp_path):
    write_library(tmp_path / "lib")
    sources = find_sources([tmp_path / "lib"], SMALL)
    train_tokenizer(training_texts(sources, 10_000), 300, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole = tokenize(sources, tokenizer, 10**6, tmp_path / "train.bin", heldout=False)
    kept_out = tokenize(sources, tokenizer, 10**6, tmp_path / "heldout.bin", heldout=True)
    for tokens, wanted in ((whole, False), (kept_out, True)):
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        texts = [part.removesuffix("</s>") for part in text.split("<s>")[1:]]
        assert texts == [s.text() for s in sources if s.heldout is wanted]
    few = tokenize(sources, tokenizer, 50, tmp_path / "few.bin", heldout=False)
    assert few.tolist() == whole[:50].tolist()
    again = tokenize([], tokenizer, 50, tmp_path / "few.bin", heldout=False)
    assert again.tolist() == few.tolist()


def test_rows_drop_the_rest_and_refuse_nothing():
    assert rows(np.arange(11, dtype=np.uint16), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(BuildError, match="2 tokens give no row of 3"):
        rows(np.arange(2, dtype=np.uint16), 3)


@given(num_rows=st.integers(1, 9), count=st.integers(1, 40))
def test_row_order_goes_through_all_rows_before_it_repeats_one(num_rows, count):
    order = row_order(num_rows, count, seed=3)
    assert len(order) == count
    seen = np.bincount(order, minlength=num_rows)
    assert seen.max() - seen.min() <= 1
    longer = row_order(num_rows, count + 5, seed=3)
    assert order.tolist() == longer[:count].tolist(), "a shortened run keeps its order"


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [learning_rate(step, 1000, 1.0, 100) for step in range(1000)]
    assert rates[99] == rates[100] == max(rates) == 1.0
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert 0 < rates[-1] < 1e-4
    assert learning_rate(1, 20, 1.0, 100) == 1.0, "a short run has a short warm-up"


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def test_an_interrupted_target_goes_on_as_if_nothing_happened(tmp_path, monkeypatch):
    recipe = TargetRecipe(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, batch_size=2, context=8, warmup_steps=2,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 50, 400).astype(np.uint16)
    monkeypatch.setattr("demo.target_stage.CHECKPOINT_EVERY", 5)

    def train(path, **kwargs):
        return train_target(tokens, recipe, 200, path, minutes=None, **{"seed": 1, **kwargs})

    expected = train(tmp_path / "whole.pt").state_dict()

    def stop_at_the_eighth(step, *args):
        if step == 8:
            raise KeyboardInterrupt
        return learning_rate(step, *args)

    with monkeypatch.context() as patch:
        patch.setattr("demo.target_stage.learning_rate", stop_at_the_eighth)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "parts.pt")
    assert torch.load(tmp_path / "parts.pt")["step"] == 5
    resumed = train(tmp_path / "parts.pt").state_dict()
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name
    with pytest.raises(BuildError, match="repeat that run's options"):
        train(tmp_path / "parts.pt", seed=2)


def test_head_losses_compare_each_head_with_the_target_further_ahead():
    """Against a loop over positions, spelled out."""
    model = tiny_model()
    heads = MedusaHeads(3, 1, 16, 50, shared_lm_head=True)
    torch.nn.init.normal_(heads.blocks[0].weight)
    lm_head = model.lm_head.weight.detach()
    hidden = torch.randn(2, 7, 16)
    temperatures = torch.tensor([0.5, 2.0])
    losses = list(head_losses(heads, lm_head, hidden, temperatures))
    for k, loss in enumerate(losses):
        terms = []
        for b, t in itertools.product(range(2), range(7 - k - 1)):
            label = (lm_head @ hidden[b, t + k + 1] / temperatures[b]).softmax(-1)
            logits = lm_head @ heads(hidden[b, t][None])[0, k]
            terms.append(-(label * logits.log_softmax(-1)).sum())
        assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-4)


def test_label_ranks_look_up_the_right_tokens():
    """An LM head of one-hot rows and a hidden state that names a token: the rank is known."""
    lm_head = torch.eye(8)
    heads = MedusaHeads(2, 0, 8, 8, shared_lm_head=True)  # no layers: predicts its hidden state
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    hidden = torch.nn.functional.one_hot(ids + 2 - (ids >= 6) * 2, 8).numpy().astype(np.float16)
    part = Rows(ids.numpy().astype(np.uint16), hidden, np.ones(1))
    (ranks,) = label_ranks(heads, lm_head, part)
    assert ranks.shape == (5, 2)
    assert ranks[:, 0].tolist() == [0] * 5, "head 0 predicts the token two places ahead"
    assert (ranks[:, 1] > 0).all()
    assert len(label_ranks(heads, lm_head, part, first=np.array([4]))[0]) == 2


def test_accuracies_are_shares_of_each_rank():
    ranks = torch.tensor([[0, 2], [0, 0], [1, 5], [3, 5]])
    assert accuracies(ranks, 3) == [[0.5, 0.25, 0.0], [0.25, 0.0, 0.25]]


def test_scale_keeps_the_proportions():
    assert scaled("all", None) == (CorpusRecipe(), TargetRecipe(), HeadsRecipe())
    _, target, heads = scaled("all", 1_500_000)
    assert target.tokens == 1_500_000
    assert heads.source_tokens == HeadsRecipe().source_tokens // 10
    _, target, heads = scaled("heads", 240_000)
    assert target.tokens == TargetRecipe().tokens, "a given target keeps its size"
    whole = HeadsRecipe().source_tokens + HeadsRecipe().sampled_tokens
    assert heads.source_tokens + heads.sampled_tokens == pytest.approx(240_000, abs=2)
    assert heads.source_tokens / 240_000 == pytest.approx(HeadsRecipe().source_tokens / whole)


@pytest.mark.parametrize(("text", "value"), [("1500", 1500), ("200k", 200_000), ("1.5M", 1500000)])
def test_amount_reads_counts(text, value):
    assert amount(text) == value


@pytest.mark.parametrize("text", ["", "k", "many", "-3", "0"])
def test_amount_refuses_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no count"):
        amount(text)


def test_a_stage_without_its_input_says_what_to_run_first(tmp_path, capsys):
    write_library(tmp_path / "lib")
    common = ["--out", str(tmp_path / "out"), "--sources", str(tmp_path / "lib")]
    assert main(["target", *common]) == 2
    assert "run the stage 'tokenizer' first" in capsys.readouterr().err
    assert main(["heads", *common]) == 2
    assert "run the stage 'target' first" in capsys.readouterr().err


def tiny_build(tmp_path, **changes):
    settings = {
        "out": tmp_path / "out",
        "target": tmp_path / "out" / "target",
        "roots": [tmp_path / "lib"],
        "corpus": replace(SMALL, max_bytes=100_000, heldout_tokens=2_000),
        "target_recipe": TargetRecipe(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
            num_kv_heads=1, head_dim=8, tokens=4_000, batch_size=2, context=32, warmup_steps=2,
        ),
        "heads_recipe": HeadsRecipe(
            num_heads=2, num_layers=1, source_tokens=320, sampled_tokens=320, sample_batch=6,
            prompt_tokens=(2, 6), context=32, epochs=1, batch_tokens=64, heldout_rows=4,
            tree_draft_tokens=5,
        ),
        "minutes": None,
        "seed": 0,
    }  # fmt: skip
    return Build(**{**settings, **changes})


def test_all_stages_end_in_heads_that_fit_their_target(tmp_path):
    write_library(tmp_path / "lib", 200)
    build = tiny_build(tmp_path)
    build.run_tokenizer()
    build.run_target()
    build.run_heads()
    model = LlamaForCausalLM.from_pretrained(build.target)
    assert model.dtype == torch.bfloat16
    heads, info = load_heads(build.out / "heads", hidden_size=16, vocab_size=300)
    assert (heads.num_heads, heads.num_layers, info.shared_lm_head) == (2, 1, True)
    assert len(info.tree) == 5
    kept = {path: path.stat().st_mtime_ns for path in build.work.iterdir()}
    again = tiny_build(tmp_path)
    again.run_target()
    again.run_heads()
    changed = {path.name for path, time in kept.items() if path.stat().st_mtime_ns != time}
    assert changed == {"heads.json"}, "what is done is kept"
    assert set(build.work.iterdir()) == set(kept)
    tiny_build(tmp_path, seed=1).run_heads()
    new = {path.name.split("-")[0] for path in set(build.work.iterdir()) - set(kept)}
    assert new >= {"source", "sampled", "heads"}, "another seed takes nothing stale"


def test_sampled_rows_start_with_code_and_keep_their_prompts(tmp_path):
    write_library(tmp_path / "lib", 100)
    build = tiny_build(tmp_path)
    build.run_tokenizer()
    build.run_target()
    model, tokenizer = build.load_target()
    tokens = build.tokens(4_000, heldout=False)
    ids, prompts, temperatures = sample_rows(
        model, tokenizer, tokens, 8, build.heads_recipe, temperatures=(0.5, 1.0), seed=0
    )
    assert ids.shape == (8, 32)
    assert temperatures.tolist() == [0.5, 1.0] * 4
    assert set(prompts) <= set(range(3, 8)), "two to six tokens and the start token"
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for row, length in zip(ids.tolist(), prompts, strict=True):
        assert row[0] == tokenizer.bos_token_id
        assert "\n" + tokenizer.decode(row[1:length], skip_special_tokens=False) in text
    again = sample_rows(
        model, tokenizer, tokens, 8, build.heads_recipe, temperatures=(0.5, 1.0), seed=0
    )
    assert np.array_equal(again[0], ids)
