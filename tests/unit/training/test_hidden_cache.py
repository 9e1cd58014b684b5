"""Cached states are the target's, whatever was killed, bounded or changed before."""

import fcntl
import os
import threading
from dataclasses import replace

import pytest
import torch
from support.models import save_model
from support.records import random_records

from vllm_medusa.offline.records import Record
from vllm_medusa.training.hidden_cache import CacheError, HiddenStates
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts

ROW = 64 * 4  # bytes


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target.load(save_model(tmp_path_factory.mktemp("target"), "Llama"))


@pytest.fixture
def texts():
    return Texts.of(random_records(20))


@pytest.fixture
def states(target, texts, tmp_path):
    """Make the states of the texts, or those of others, in a folder."""

    def made(folder=tmp_path, texts=texts, target=target, key="a", **options):
        settings = {"dtype": torch.float32, "max_bytes": 1 << 30}
        settings |= {"shard_bytes": 40 * ROW, "forward_tokens": 64}
        return HiddenStates(target, texts, folder, {"target": key}, **settings | options)

    return made


def everything(texts: Texts) -> list[tuple[int, int, int]]:
    rows = texts.first_row[1:] - texts.first_row[:-1]
    return [(span, 0, int(count)) for span, count in enumerate(rows)]


def straight(target: Target, texts: Texts) -> torch.Tensor:
    """Record by record, the definition."""
    found = []
    for span, _, rows in everything(texts):
        record = int(texts.span_record[span])
        ids = torch.from_numpy(texts.token_ids(record)).long()[None]
        at = int(texts.span_position[span])
        found.append(target.hidden_states(ids)[0, at : at + rows])
    return torch.cat(found)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_states_are_the_targets_cached_or_not(states, share, target, texts, tmp_path):
    bound = int(share * texts.num_rows * ROW)
    kept = states(max_bytes=bound)
    kept.build()
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*.bin"))
    assert on_disk == kept.cached_bytes <= bound
    assert (kept.cached_bytes == kept.needed_bytes) == (share > 1)
    assert (kept.num_shards > 1) == (share > 0)
    wanted = everything(texts)
    order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(0)).tolist()
    parts = list(straight(target, texts).split([rows for _, _, rows in wanted]))
    found, expected = kept.read([wanted[i] for i in order]), torch.cat([parts[i] for i in order])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    span = max(range(len(wanted)), key=lambda i: wanted[i][2])
    torch.testing.assert_close(kept.read([(span, 2, 5)]), parts[span][2:5], rtol=1e-4, atol=1e-4)


def test_cached_and_computed_states_meet_where_the_target_computes(states, texts, monkeypatch):
    """ "meta" stands for a GPU: torch refuses to put its tensors behind one of the CPU."""
    kept = states(max_bytes=texts.num_rows * ROW // 2)
    kept.build()
    computed = kept._computed
    monkeypatch.setattr(
        kept, "_computed", lambda records: [(r, s.to("meta")) for r, s in computed(records)]
    )
    wanted = everything(texts)
    assert kept.read(wanted[:1]).device.type == "cpu", "it is cached"
    found = kept.read(wanted)
    assert found.device.type == "meta" and found.shape == (texts.num_rows, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(states, dtype, texts):
    """Shards of as many rows: passes of other shapes may differ in the last bit of fp32."""
    full = states(shard_bytes=40 * ROW)
    half = states(shard_bytes=40 * ROW // 2, dtype=dtype)
    full.build()
    half.build()
    assert half.num_shards == full.num_shards > 1
    assert half.folder != full.folder and half.cached_bytes * 2 == full.cached_bytes
    wanted = full.read(everything(texts))
    assert torch.equal(half.read(everything(texts)), wanted.to(dtype).float())


def test_building_goes_on_with_what_lacks(states, texts):
    kept = states()
    kept.build()
    wanted = kept.read(everything(texts)).clone()
    shards = sorted(kept.folder.glob("*.bin"))
    times = {shard: shard.stat().st_mtime_ns for shard in shards}
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-4])  # a torn copy
    (kept.folder / "000000.part-1").write_bytes(b"killed here")
    again = states()
    assert again.missing() == [1, 2]
    reports = []
    again.build(lambda done, total: reports.append((done, total)))
    assert torch.equal(again.read(everything(texts)), wanted)  # bit for bit
    rebuilt = {shard for shard in shards if shard.stat().st_mtime_ns != times[shard]}
    assert rebuilt == {shards[1], shards[2]}
    assert reports[-1][0] == reports[-1][1] < texts.num_rows


def test_shards_are_replaced_not_written_over(states, tmp_path):
    """A run that is killed meanwhile leaves a shard that lacks, not one of the right size."""
    states().build()
    shard = min(tmp_path.rglob("*.bin"))
    whole, torn = shard.read_bytes(), tmp_path / "torn"
    shard.write_bytes(whole[:-4])
    os.link(shard, torn)
    states().build()
    assert torn.read_bytes() == whole[:-4] and shard.read_bytes() == whole


def test_two_processes_build_half_each(states, texts, tmp_path):
    alone = states(tmp_path / "alone")
    alone.build()
    first = states(tmp_path / "both")
    first.build(rank=0, world=2)
    assert first.missing() == list(range(1, first.num_shards, 2))
    states(tmp_path / "both").build(rank=1, world=2)
    assert not first.missing()
    assert torch.equal(first.read(everything(texts)), alone.read(everything(texts)))


def test_a_cache_in_use_is_not_removed(states, texts, tmp_path):
    first, second = (states() for _ in range(2))
    first.build()
    second.build()
    wanted = first.read(everything(texts)).clone()
    first.remove()
    assert not second.missing() and torch.equal(second.read(everything(texts)), wanted)
    second.remove()
    assert not any(tmp_path.iterdir())
    second.remove()  # nothing is there
    first.build()
    assert torch.equal(first.read(everything(texts)), wanted)


def test_a_folder_removed_while_another_run_waits_for_it_is_made_anew(states, target, tmp_path):
    first, second = (states() for _ in range(2))
    first.build()
    with (first.folder / "lock").open("ab") as removing:
        first.release()
        fcntl.flock(removing, fcntl.LOCK_EX)
        waiting = threading.Thread(target=second.build)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        first.folder.replace(tmp_path / "aside")
    waiting.join()
    assert not second.missing()
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]


def test_what_killed_runs_left_goes_when_nobody_else_is_there(states, tmp_path):
    first = states()
    first.build()
    torn, removed = first.folder / "000000.part-1", tmp_path / f"{first.folder.name}.removed-1"
    torn.touch()
    removed.mkdir()
    second = states()
    second.build()
    assert torn.exists(), "the first may be writing it"
    first.release()
    second.release()
    second.build()
    assert not torn.exists() and not removed.exists()


def test_another_target_text_or_plan_is_another_cache(states, texts):
    kept = states()
    kept.build()
    first, *rest = random_records(20)
    one_token = [replace(first, token_ids=(first.token_ids[0] ^ 1, *first.token_ids[1:])), *rest]
    others = [
        states(key="b"),
        states(texts=Texts.of(random_records(20, seed=1))),
        states(texts=Texts.of(one_token)),  # the same plan
        states(shard_bytes=50 * ROW),
    ]
    assert len({kept.folder, *(other.folder for other in others)}) == 5
    assert not states().missing()


def test_pieces_of_what_is_not_cached_stay_together(states, texts):
    pieces = texts.pieces(4)
    assert states().groups(pieces) == list(range(len(pieces)))
    groups = states(max_bytes=0).groups(pieces)
    records = [texts.record_of(piece) for piece in pieces]
    assert len(set(groups)) == len(set(records)) == len(set(zip(groups, records, strict=True)))


def test_refused_when_the_disk_is_full(states, tmp_path, monkeypatch):
    kept = states()
    free = type("Usage", (), {"free": kept.cached_bytes})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    kept.check_space()
    with pytest.raises(CacheError, match="--cache-gb"):
        kept.check_space(others=1)
    assert not any(tmp_path.iterdir())
    kept.build()
    kept.check_space(others=kept.cached_bytes)  # what is there needs no space


@pytest.fixture
def broken(target):
    weight = target.model.get_input_embeddings().weight
    before = weight[77].clone()
    weight[77] = float("nan")
    yield target
    weight[77] = before


def test_states_that_are_not_finite_name_their_line(states, broken, tmp_path):
    spans = ((1, 6),)
    good = Record(0, 4, "a", (3, 4, 5, 6, 7, 8), spans, None)
    bad = Record(1, 9, "b", (3, 77, 5, 6, 7, 8), spans, None)
    with pytest.raises(CacheError, match="line 9"):
        states(target=broken, texts=Texts.of([good, bad])).build()
    assert not list(tmp_path.rglob("*.bin"))
    told = states(target=broken, texts=Texts.of([bad]), file="mine.jsonl", remedy="Drop it")
    with pytest.raises(CacheError, match=r"mine\.jsonl, line 9: .* Drop it"):
        told.build()
