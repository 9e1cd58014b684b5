"""EAGLE-3 training matches serving, and an interrupted run ends with the same weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle import Eagle3 as Dense
from support.eagle import features_of
from support.models import save_model

from vllm_medusa.heads import eagle_model
from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.heads.eagle_checkpoint import inspect_eagle
from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape, choose_layers
from vllm_medusa.heads.model import HeadsError
from vllm_medusa.training import eagle3
from vllm_medusa.training.eagle3 import AuxiliaryStates
from vllm_medusa.training.options import (
    CacheOptions,
    HeadOptions,
    StepOptions,
    TextFiles,
    TrainMachine,
    TrainOptions,
)
from vllm_medusa.training.target import Target
from vllm_medusa.training.train import train

K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), "Llama")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Random texts of different lengths, each with two generated spans."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    with path.open("w") as file:
        for index in range(12):
            ids = torch.randint(3, 512, (30 + index,), generator=generator).tolist()
            line = {"index": index, "token_ids": ids, "generated": [[6, 14], [17, len(ids) - 2]]}
            file.write(json.dumps(line | {"temperature": 0.7}) + "\n")
    return path


def options(target: str, records: Path, output: Path, **steps: Any) -> TrainOptions:
    return TrainOptions(
        model=target,
        files=TextFiles(data=records, output=output, heldout_share=0.2),
        heads=HeadOptions(kind="eagle3", num_heads=K, draft_vocab=300),
        training=StepOptions(epochs=4, batch_tokens=80, measure_every=5, **steps),
        machine=TrainMachine(device="cpu", precision="float32"),
    )


class Stop:
    """Progress that interrupts a training at a given step."""

    def __init__(self, at: int) -> None:
        self.cut = at

    def at(self, stage: str, step: int, *_: Any) -> None:
        if stage == "training" and step == self.cut:
            raise KeyboardInterrupt

    def note(self, _: str) -> None:
        pass

    warn = note


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "training/log.jsonl").read_text().splitlines()]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def losses_of(output: Path) -> list[float]:
    return [line["loss"] for line in log_of(output) if "loss" in line]


@pytest.fixture(scope="module")
def trained(target, records, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "drafter"
    train(options(target, records, output))
    return output


@pytest.mark.parametrize("option", [False, True])
def test_each_step_equals_a_dense_pass_of_its_path(option):
    """Without and with the norms of EAGLE-3.1 and speculators' residual."""
    torch.manual_seed(0)
    sizes = (64, 512, (0, 1, 2), 4, 2, 32, 128, 10000.0, 1e-6, 1024)
    shape = EagleShape(*sizes, *[option] * len(eagle_model.OPTIONS))
    mine = EagleDrafter(shape, K, torch.arange(0, 512, 2))
    for parameter in mine.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.2)
    mine.embedding = torch.randn(512, 64)
    dense = Dense(mine.embedding, torch.arange(0, 512, 2), shape.layers)
    if option:
        dense.add_norms()
        dense.norm_before_residual = True
    missing = dense.load_state_dict(mine.state_dict(), strict=False).missing_keys
    assert sorted(missing) == ["embedding", "target_ids"]
    text, features, length = torch.randint(512, (14,)), torch.randn(14, 192), 10
    path = torch.stack([text[1 + step : 1 + step + length] for step in range(K)], 1)
    padded = torch.cat([features[:length], torch.full((3, 192), 9.0)])
    with torch.no_grad():
        x = mine(padded[None], torch.nn.functional.pad(path, (0, 0, 0, 3))[None])
        for row in (0, 4, 9):
            for step in range(K):
                below = text[row + 2 : row + 2 + step].tolist()
                wanted, _ = dense.dense(text[1 : row + 2], features[: row + 1], below)
                found = mine.compute_logits(x[0, row, step])
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        # a piece of a text keeps its original positions
        first = torch.tensor([5, 5])
        moved = mine(features[None, :4].expand(2, -1, -1), path[None, :4].expand(2, -1, -1), first)
        torch.testing.assert_close(moved[0], mine(features[None, :4], path[None, :4])[0])


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2), (2,)])
def test_states_are_inputs_of_layers(target, layers):
    loaded = Target.load(target)
    ids = torch.randint(3, 512, (2, 9))
    with torch.no_grad():
        found = AuxiliaryStates(loaded, layers).hidden_states(ids, torch.ones_like(ids))
    wanted, logits = features_of(loaded.model, ids, layers)
    torch.testing.assert_close(found[..., :-64], wanted)
    torch.testing.assert_close(loaded.lm_head(found[..., -64:]), logits)


def test_layers_are_chosen_and_checked():
    chosen = {depth: choose_layers((), depth) for depth in (2, 3, 4, 6, 32)}
    assert chosen == {2: (0, 1, 2), 3: (1, 2, 3), 4: (1, 2, 3), 6: (1, 3, 4), 32: (2, 16, 29)}
    assert choose_layers((9, 3, 1), 12) == (1, 3, 9)
    for base, depth in (((1, 1, 2), 4), ((1, 2), 4), ((2, 3, 5), 4), ((), 1)):
        with pytest.raises(HeadsError, match="--aux-layers"):
            choose_layers(base, depth)


def test_an_interrupted_run_ends_with_the_same_weights(target, records, trained, tmp_path):
    base = options(target, records, tmp_path / "cut")
    for cut in (3, 8):  # before any checkpoint was written, and between two
        with pytest.raises(KeyboardInterrupt):
            train(base, Stop(cut))
    train(base)
    mine, whole = weights_of(tmp_path / "cut"), weights_of(trained)
    assert mine.keys() == whole.keys()
    assert all(torch.equal(mine[name], whole[name]) for name in mine)
    assert log_of(tmp_path / "cut") == log_of(trained)
    losses = losses_of(trained)
    assert losses[-1] < 0.95 * losses[0]
    assert not (trained / "training/work").exists()


def test_it_starts_from_the_targets_last_layer(target):
    loaded = Target.load(target, dtype=torch.float32, device="cpu")
    drafter = eagle3.new_drafter(loaded, (0, 1, 2), K, None, frozen_lm_head=True, seed=0)
    last, hidden = dict(eagle3.decoder_layers(loaded)[-1].named_parameters()), loaded.hidden_size
    own = dict(drafter.midlayer.named_parameters())
    for name in ("q", "k", "v"):
        given = last[f"self_attn.{name}_proj.weight"]
        embedding, state = own[f"self_attn.{name}_proj.weight"].split(hidden, 1)
        assert torch.equal(state, given) and 0 < embedding.std() < given.std()
    for name in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert torch.equal(own[f"{name}.weight"], last[f"{name}.weight"])
    assert torch.equal(own["hidden_norm.weight"], last["input_layernorm.weight"])
    assert torch.equal(drafter.fc.weight, torch.eye(3 * hidden)[-hidden:])


@pytest.mark.parametrize("kind", [torch.nn.RMSNorm, torch.nn.LayerNorm])
def test_it_starts_from_the_targets_final_norm(target, kind):
    loaded = Target.load(target, dtype=torch.float32, device="cpu")
    norm = kind(loaded.hidden_size, eps=1e-6)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    loaded.backbone.norm = norm
    drafter = eagle3.new_drafter(loaded, (0, 1, 2), K, None, frozen_lm_head=True, seed=0)
    torch.testing.assert_close(drafter.norm.weight, norm.weight)


def test_the_config_describes_the_drafter(target, trained):
    config = json.loads((trained / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    heldout = config["medusa"]["training"]["heldout"]
    assert len(heldout["top"]) == K and heldout["labels"] > 0
    found = inspect_eagle(trained, target)
    assert found.fits
    assert (found.drafter.method, found.drafter.draft_vocab_size) == ("eagle3", 300)
    with pytest.raises(HeadsError, match="an EAGLE drafter, not heads"):
        peek_heads(trained)  # as in calibrate and tree


def test_passes_and_computed_states_change_nothing(target, records, trained, tmp_path, monkeypatch):
    computed = options(target, records, tmp_path / "computed")
    train(replace(computed, cache=CacheOptions(cache_gb=0.0)))
    monkeypatch.setattr(eagle3.Eagle3, "pass_rows", 40)
    train(options(target, records, tmp_path / "passes"))
    for name in ("computed", "passes"):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(trained), rel=1e-4)


def test_training_continues_from_a_drafter(target, records, trained, tmp_path):
    base = options(target, records, tmp_path / "same", learning_rate=1e-12)
    more = replace(base.training, epochs=1)
    heads = HeadOptions(kind="eagle3", num_heads=K, start_heads=trained)
    train(replace(base, heads=heads, training=more))
    mine, wanted = weights_of(tmp_path / "same"), weights_of(trained)
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in mine)
    before, after = (
        json.loads((folder / "config.json").read_text())["medusa"]["provenance"]
        for folder in (trained, tmp_path / "same")
    )
    assert after[0] == before[0] and len(after) == 2
    for shape, reason in (
        ({"kind": "medusa"}, "--drafter is medusa, but .* has eagle3"),
        ({"kind": "eagle3", "aux_layers": (0, 1, 3)}, r"--aux-layers is \(0, 1, 3\), but .* has"),
    ):
        other = replace(base.files, output=tmp_path / "refused")
        with pytest.raises(ValueError, match=reason):
            train(replace(base, files=other, heads=HeadOptions(start_heads=trained, **shape)))
        assert not other.output.exists()


def other_start(trained, folder, changes, **tensors):
    """The trained drafter with another config, and with other tensors; None removes one."""
    shutil.copytree(trained, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    found = weights_of(trained) | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return HeadOptions(kind="eagle3", num_heads=K, start_heads=folder)


def test_training_continues_from_eagle_3_1(target, records, trained, tmp_path):
    """Its norms are trained, and its options are kept."""
    norms = {f"fc_norm.{state}.weight": torch.full((64,), 2.0) for state in range(3)}
    given = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    embedding = Target.load(target, dtype=torch.float32, device="cpu").embedding_weight
    more = norms | {"embed_tokens.weight": embedding.clone()}
    heads = other_start(trained, tmp_path / "start", given | {"rope_theta": 500.0}, **more)
    train(replace(options(target, records, tmp_path / "more"), heads=heads))
    assert losses_of(tmp_path / "more")[-1] < losses_of(tmp_path / "more")[0]
    after = weights_of(tmp_path / "more")
    assert after.keys() == weights_of(trained).keys() | norms.keys()
    assert all(not torch.equal(after[name].float(), norm) for name, norm in norms.items())
    found = inspect_eagle(tmp_path / "more", target)
    assert found.fits and found.drafter.kind == "EAGLE-3.1"
    assert found.drafter.features[0] == "3 norms before fc" and len(found.drafter.features) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "has sliding_window"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "has rope_type"),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor"),
        ({"speculators_model_type": "eagle"}, "its architecture is eagle of speculators"),
        (("d2t", torch.full((300,), -5)), "draft vocabulary: .* token ids from -5"),
        (("norm.weight", None), 'it has no "norm.weight"'),
        (("norm.weight", torch.ones(3)), '"norm.weight" has the shape'),
        (("other", torch.ones(3)), 'it has "other"'),
        (("embed_tokens.weight", torch.ones(512, 64)), '"embed_tokens.weight" is not the target'),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_training_does_not_continue_from_others(
    target, records, trained, tmp_path, changes, reason
):
    config, tensors = (changes, {}) if isinstance(changes, dict) else ({}, dict([changes]))
    heads = other_start(trained, tmp_path / "start", config, **tensors)
    with pytest.raises(ValueError, match=f"{reason}.* without --start-heads"):
        train(replace(options(target, records, tmp_path / "more"), heads=heads))


def test_heads_and_drafters_share_hidden_states(target, records, trained, tmp_path):
    cache = CacheOptions(cache=tmp_path / "states")
    base = options(target, records, tmp_path / "shared")
    train(replace(base, cache=cache))
    mine, wanted = weights_of(tmp_path / "shared"), weights_of(trained)
    assert all(torch.equal(mine[name], wanted[name]) for name in mine)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}
    kinds = {path.stem.partition("-")[2] for path in files}
    assert kinds == {"layer-0", "layer-1", "layer-2", "last"}
    medusa = replace(base, heads=HeadOptions(kind="medusa", num_heads=2))
    for name, given in (("alone", CacheOptions()), ("heads", cache)):
        train(replace(medusa, cache=given, files=replace(base.files, output=tmp_path / name)))
    alone, heads = weights_of(tmp_path / "alone"), weights_of(tmp_path / "heads")
    assert all(torch.equal(alone[name], heads[name]) for name in alone)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")} == files


def test_a_shared_lm_head_is_not_trained(target, records, trained, tmp_path):
    base = options(target, records, tmp_path / "drafter")
    train(replace(base, heads=replace(base.heads, lm_heads="shared")))
    shared, own = weights_of(tmp_path / "drafter"), weights_of(trained)
    rows = torch.arange(300) + shared["d2t"]
    embedding = Target.load(target, dtype=torch.float32, device="cpu").lm_head_weight
    assert torch.equal(shared["lm_head.weight"], embedding[rows].to(torch.bfloat16))
    assert not torch.equal(own["lm_head.weight"], embedding[rows].to(torch.bfloat16))
    assert not torch.equal(shared["fc.weight"], own["fc.weight"]), "everything else is trained"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "medusa-2"}, "not with eagle3. Add --drafter medusa"),
        ({"heads": {"num_layers": 2}}, "--num-layers 2 is for Medusa and Hydra"),
        ({"heads": {"kind": "hydra", "aux_layers": (1, 2, 3)}}, "for EAGLE-3, not for"),
    ],
)
def test_options_without_effect_are_refused(target, records, tmp_path, changes, reason):
    base = options(target, records, tmp_path)
    shape = {"kind": "eagle3"} | changes.get("heads", {})
    with pytest.raises(ValueError, match=reason):
        replace(base, **(changes | {"heads": HeadOptions(**shape)}))


@pytest.mark.parametrize("gap", [0.0, 4.0, 60.0, -60.0])
def test_chains_attend_to_exact_entries_and_to_themselves(gap):
    """Against a softmax over all visible entries; ``gap``: of the chain's scores."""
    batch, length, dim, groups, heads = 2, 9, 8, 2, 4
    torch.manual_seed(0)
    query = torch.randn(batch, heads, length, dim)
    keys = [torch.randn(batch, groups, length, dim) for _ in range(3)]
    values = [torch.randn(batch, groups, length, dim) for _ in range(3)]
    keys[0][..., 0] = 0.0
    query[..., 0] = dim**0.5
    for key in keys[1:]:
        key[..., 0] = gap
    leaves = [query, *keys, *values]
    for leaf in leaves:
        leaf.requires_grad_()
    found = eagle_model._attend(query, keys, values)

    def of_heads(part):
        return part.double().repeat_interleave(heads // groups, 1)

    exact = query.double() @ of_heads(keys[0]).transpose(-1, -2)
    exact = exact.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    chain = [(query.double() * of_heads(key)).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat([exact, *chain], -1) / dim**0.5).softmax(-1)
    expected = weights[..., :length] @ of_heads(values[0])
    for step, value in enumerate(values[1:]):
        expected = expected + weights[..., length + step, None] * of_heads(value)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    some = torch.randn(found.shape)
    got = torch.autograd.grad((found * some).sum(), leaves)
    wanted = torch.autograd.grad((expected * some).sum(), leaves)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_far_scores_stay_finite():
    query, key, value = torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    for gap in (-90.0, -400.0, 90.0, 400.0):
        parts = [query.clone().requires_grad_(), (key * gap).requires_grad_()]
        out = eagle_model._attend(parts[0], [key, parts[1]], [value, 2 * value])
        assert out.isfinite().all() and out.min() > 0.99 and out.max() < 2.01
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), parts))
