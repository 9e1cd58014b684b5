"""The parts of demo/build.py that can be tested without training anything to the end."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.build import Build, amount, main, scaled
from demo.corpus import BuildError, find_sources, rows, tokenize, training_texts
from demo.heads import write_prompts
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.target_stage import learning_rate, row_order, train_target, train_tokenizer
from vllm_medusa.heads import load_heads
from vllm_medusa.job import SILENT

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
    whole = tokenize(sources, tokenizer, 10**6, tmp_path / "train.bin", SILENT, heldout=False)
    kept_out = tokenize(sources, tokenizer, 10**6, tmp_path / "heldout.bin", SILENT, heldout=True)
    for tokens, wanted in ((whole, False), (kept_out, True)):
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        texts = [part.removesuffix("</s>") for part in text.split("<s>")[1:]]
        assert texts == [s.text() for s in sources if s.heldout is wanted]
    few = tokenize(sources, tokenizer, 50, tmp_path / "few.bin", SILENT, heldout=False)
    assert few.tolist() == whole[:50].tolist()
    again = tokenize([], tokenizer, 50, tmp_path / "few.bin", SILENT, heldout=False)
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


def test_scale_keeps_the_proportions():
    assert scaled("all", None) == (CorpusRecipe(), TargetRecipe(), HeadsRecipe())
    _, target, heads = scaled("all", 1_500_000)
    assert target.tokens == 1_500_000
    assert heads.tokens == HeadsRecipe().tokens // 10
    _, target, heads = scaled("heads", 240_000)
    assert target.tokens == TargetRecipe().tokens, "a given target keeps its size"
    assert heads.tokens == 240_000


def test_amount_reads_counts_and_refuses_all_else():
    assert [amount(text) for text in ("1500", "200k", "1.5M")] == [1500, 200_000, 1_500_000]
    for text in ("", "k", "many", "-3", "0"):
        with pytest.raises(ValueError, match="not a count"):
            amount(text)


def test_a_stage_without_its_input_says_what_to_run_first(tmp_path, capsys):
    write_library(tmp_path / "lib")
    common = ["--out", str(tmp_path / "out"), "--sources", str(tmp_path / "lib")]
    for stage, missing in (("target", "tokenizer"), ("heads", "target")):
        assert main([stage, *common]) == 2
        assert f"run the stage '{missing}' first" in capsys.readouterr().err.replace("\n", " ")
    assert main(["target", *common, "--target", str(tmp_path)]) == 2
    assert "goes with the stage 'heads'" in capsys.readouterr().err.replace("\n", " ")


def tiny_build(tmp_path, **changes):
    settings = {
        "out": tmp_path / "out",
        "target": tmp_path / "out" / "target",
        "roots": [tmp_path / "lib"],
        "corpus": replace(SMALL, max_bytes=100_000, heldout_tokens=2_000),
        "target_recipe": TargetRecipe(
            vocab_size=280, hidden_size=64, intermediate_size=32, num_layers=1, num_heads=2,
            num_kv_heads=1, head_dim=32, tokens=4_000, batch_size=2, context=32, warmup_steps=2,
        ),
        "heads_recipe": HeadsRecipe(
            num_heads=2, num_layers=1, tokens=640, temperatures=(0.6, 1.0), prompt_tokens=(10, 24),
            max_tokens=16, epochs=1, batch_tokens=64, tree_draft_tokens=5, heldout_prompts=8,
        ),
        "minutes": None,
        "seed": 0,
        "progress": SILENT,
    }  # fmt: skip
    return Build(**{**settings, **changes})


def run_here(job, options, progress, log):
    """Spares two processes the import of vLLM; test_children is about such processes."""
    job(options, progress)


@pytest.mark.engine
def test_all_stages_end_in_heads_that_fit_their_target(tmp_path, monkeypatch):
    monkeypatch.setattr("demo.heads.run_in_process", run_here)
    write_library(tmp_path / "lib", 200)
    build = tiny_build(tmp_path)
    build.run_tokenizer()
    build.run_target()
    build.run_heads()
    model = LlamaForCausalLM.from_pretrained(build.target)
    assert model.dtype == torch.bfloat16
    heads, info = load_heads(build.out / "heads", hidden_size=64, vocab_size=280)
    assert (heads.num_heads, heads.num_layers, info.shared_lm_head) == (2, 1, True)
    assert len(info.tree) == 5
    records = [json.loads(line) for line in (build.work / "train.jsonl").read_text().splitlines()]
    assert {record["temperature"] for record in records} == {0.6, 1.0}
    kept = {path: path.stat().st_mtime_ns for path in build.out.rglob("*") if path.is_file()}
    again = tiny_build(tmp_path)
    again.run_target()
    again.run_heads()
    now = {path: path.stat().st_mtime_ns for path in build.out.rglob("*") if path.is_file()}
    assert now == kept, "what is done is kept"


def test_prompts_are_cut_out_of_single_files_at_top_level(tmp_path):
    write_library(tmp_path / "lib", 100)
    build = tiny_build(tmp_path)
    build.run_tokenizer()
    tokens = build.tokens(4_000, heldout=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(build.target)
    texts = []
    for name, seed in (("a", 0), ("again", 0), ("b", 1)):
        path = tmp_path / name
        write_prompts(path, tokens, tokenizer, 8, (2, 6), seed)
        texts.append([json.loads(line)["prompt"] for line in path.read_text().splitlines()])
    assert texts[0] == texts[1] != texts[2]
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    for prompt in texts[0]:
        text = prompt.removeprefix("<s>")
        assert prompt.startswith("<s>") and "\n" + text in whole
        assert "<s>" not in text and "</s>" not in text
        assert len(tokenizer.encode(text, add_special_tokens=False)) <= 6
