"""A drafter packed and unpacked: what is preserved, how far weights change, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.packed import FILE, pack, unpack, usable
from vllm_medusa.files import FileRefused

IDS = torch.tensor([0, 7, 49_151, 2])


@pytest.fixture
def drafter(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "drafter"
    folder.mkdir()
    rows = torch.randn(48, 96) * torch.logspace(-3, 1, 48)[:, None]  # rows of different magnitudes
    rows[5] = 0
    tensors = {
        "fc.weight": rows.bfloat16(),
        "stacked": torch.randn(3, 8, 16).bfloat16(),
        "norm.weight": torch.randn(96).bfloat16(),
        "d2t": IDS,
        "t2d": torch.tensor([True, False, True]),
    }
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 96}))
    return folder


def test_round_trip(drafter, tmp_path):
    pack(drafter, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    before, after = load_file(drafter / FILE), load_file(tmp_path / "back" / FILE)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape
        if name in ("fc.weight", "stacked"):
            largest = tensor.float().abs().amax(-1, keepdim=True)
            error = (after[name].float() - tensor.float()).abs()
            # half an int8 step, and the rounding to bf16
            assert bool((error <= largest * (0.5 / 127 + 2**-8)).all())
            assert error.max() > 0
        else:
            assert torch.equal(after[name], tensor), name
    assert (tmp_path / "back" / "config.json").read_text() == '{"hidden_size": 96}'


def test_stored_tensors(drafter, tmp_path):
    pack(drafter, tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / FILE)
    assert stored["fc.weight"].dtype == torch.int8 and stored["fc.weight.scale"].shape == (48, 1)
    assert stored["d2t"].dtype == torch.int32 and stored["d2t"].tolist() == IDS.tolist()
    assert usable(drafter, tmp_path, tmp_path / "made") == drafter
    made = usable(tmp_path / "packed", tmp_path, tmp_path / "made")
    assert made == tmp_path / "made" / "packed" and (made / FILE).is_file()


@pytest.mark.parametrize("place", ["weights", "truncated"])
def test_a_damaged_file_is_refused(drafter, tmp_path, place):
    pack(drafter, tmp_path / "packed")
    file = tmp_path / "packed" / FILE
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content if place == "weights" else content[:-50])
    with pytest.raises(FileRefused, match="damaged"):
        unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    assert not (tmp_path / "back").exists()


def test_a_file_of_another_kind_is_refused(drafter, tmp_path):
    with pytest.raises(FileRefused, match="not written by"):
        unpack(drafter, tmp_path / "back", tmp_path)


def test_unpacking_again_replaces(drafter, tmp_path):
    pack(drafter, tmp_path / "packed")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "old").touch()
    unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["config.json", FILE]


@pytest.mark.parametrize("same", [True, False])
def test_an_lm_head_of_the_targets_rows_is_not_stored(drafter, tmp_path, same):
    embedding, ids = torch.randn(64, 16).bfloat16(), torch.tensor([3, 9, 60])
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / FILE)
    tensors = {"d2t": ids - torch.arange(3), "lm_head.weight": embedding[ids].contiguous()}
    if not same:
        tensors["lm_head.weight"][1, 1] += 1
    save_file(tensors, drafter / FILE)
    pack(drafter, tmp_path / "packed", tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "packed" / FILE)) != same
    unpack(tmp_path / "packed", tmp_path / "back", tmp_path)
    again = load_file(tmp_path / "back" / FILE)["lm_head.weight"]
    assert torch.equal(again, tensors["lm_head.weight"]) == same
