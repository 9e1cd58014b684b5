"""Cached states equal the target's, after kills, limits or changes."""

import os
from dataclasses import replace

import pytest
import torch
from support.data import random_records
from support.models import save_model

from vllm_medusa.offline.records import Record
from vllm_medusa.training.hidden_cache import CacheError, HiddenStates
from vllm_medusa.training.rows import WHOLE, Texts
from vllm_medusa.training.target import Target

ROW = 64 * 4  # bytes
RECORDS = random_records(20)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target.load(save_model(tmp_path_factory.mktemp("target"), "Llama"))


@pytest.fixture
def states(target, tmp_path):
    """Create the states of the records, or of other ones, in a folder."""

    def made(folder=tmp_path, records=RECORDS, target=target, key="a", **options):
        settings = {"dtype": torch.float32, "shard_bytes": 40 * ROW, "forward_tokens": 64}
        texts = Texts(records)
        where = (texts, texts.cut(WHOLE), folder, {"target": key})
        return HiddenStates(target, *where, **settings | options)

    return made


TEXTS = Texts(RECORDS)
EVERYTHING = list(TEXTS.spans())


def straight(target: Target) -> list[torch.Tensor]:
    """The definition, record by record."""
    parts = []
    for start, end in EVERYTHING:
        number = TEXTS.record_of(start)
        whole = target.hidden_states(torch.tensor([RECORDS[number].token_ids]))[0]
        parts.append(whole[start - TEXTS.first[number] : end - TEXTS.first[number]])
    return parts


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_states_equal_the_targets_cached_or_not(states, share, target, tmp_path, in_memory):
    bound = int(share * sum(end - start for start, end in EVERYTHING) * ROW)
    kept = states(None if in_memory else tmp_path, max_bytes=bound)
    kept.build()
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*.bin"))
    assert kept.cached_bytes <= bound and on_disk == (not in_memory) * kept.cached_bytes
    assert (kept.cached_bytes == kept.needed_bytes) == (share > 1)
    parts = straight(target)
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0)).tolist()
    found, expected = kept.read([EVERYTHING[i] for i in order]), [parts[i] for i in order]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)
    longest = max(range(len(parts)), key=lambda i: len(parts[i]))
    start, _ = EVERYTHING[longest]
    some = kept.read([(start + 2, start + 5)])
    torch.testing.assert_close(some, parts[longest][2:5], rtol=1e-4, atol=1e-4)


def test_cached_states_are_moved_to_the_targets_device(states, monkeypatch):
    """ "meta" stands for a GPU: torch refuses to concatenate its tensors with the CPU's."""
    kept = states(max_bytes=states().needed_bytes // 2)
    kept.build()
    computed = kept.computed
    monkeypatch.setattr(
        kept, "computed", lambda records: [(r, s.to("meta")) for r, s in computed(records)]
    )
    assert kept.read(EVERYTHING[:1]).device.type == "cpu", "it is cached"
    assert kept.read(EVERYTHING).device.type == "meta"


def test_building_resumes_with_the_missing_parts(states, tmp_path):
    kept = states()
    kept.build()
    wanted = kept.read(EVERYTHING).clone()
    shards = sorted(kept.folder.glob("*.bin"))
    times = {shard: shard.stat().st_mtime_ns for shard in shards}
    shards[1].unlink()
    torn = tmp_path / "torn"
    shards[2].write_bytes(shards[2].read_bytes()[:-4])
    os.link(shards[2], torn)
    again, reports = states(), []
    assert again.missing() == [1, 2]
    again.build(lambda done, total: reports.append((done, total)))
    assert torch.equal(again.read(EVERYTHING), wanted)  # bit for bit
    rebuilt = {shard for shard in shards if shard.stat().st_mtime_ns != times[shard]}
    assert rebuilt == {shards[1], shards[2]}
    assert 0 < reports[0][0] < reports[-1][0] == reports[-1][1] < again.texts.first[-1]
    assert torn.stat().st_size == shards[2].stat().st_size - 4, "replaced, not overwritten in place"


def test_two_processes_build_half_each(states, tmp_path):
    alone = states(tmp_path / "alone")
    alone.build()
    first = states(tmp_path / "both")
    count = len(first.missing())
    first.build(rank=0, world=2)
    assert first.missing() == list(range(1, count, 2))
    states(tmp_path / "both").build(rank=1, world=2)
    assert torch.equal(first.read(EVERYTHING), alone.read(EVERYTHING))
    first.remove()
    assert not any((tmp_path / "both").iterdir())


def test_another_target_text_or_plan_has_another_cache(states):
    first, *rest = RECORDS
    one_token = [replace(first, token_ids=(first.token_ids[0] ^ 1, *first.token_ids[1:])), *rest]
    others = [
        states(),
        states(key="b"),
        states(records=random_records(20, seed=1)),
        states(records=one_token),
        states(shard_bytes=50 * ROW),
    ]
    assert len({other.folder for other in others}) == 5


def test_pieces_of_an_uncached_record_stay_together(states):
    pieces = TEXTS.cut(4)
    assert states().groups(pieces) == list(range(len(pieces)))
    groups, records = (
        states(max_bytes=0).groups(pieces),
        [TEXTS.record_of(piece.start) for piece in pieces],
    )
    assert len(set(groups)) == len(set(records)) == len(set(zip(groups, records, strict=True)))


def test_refused_when_the_disk_is_full(states, tmp_path, monkeypatch):
    kept = states()
    free = type("Usage", (), {"free": kept.cached_bytes})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    free.free -= 1
    with pytest.raises(CacheError, match="--cache-gb"):
        kept.build()
    assert not any(tmp_path.iterdir())
    free.free += 1
    kept.build()
    free.free = 0
    kept.build()  # existing shards need no space


def test_non_finite_states_name_their_line(states, target, tmp_path, monkeypatch):
    broken = target.model.get_input_embeddings().weight.clone()
    broken[77] = float("nan")
    monkeypatch.setattr(target.model.get_input_embeddings(), "weight", torch.nn.Parameter(broken))
    good = Record(0, 4, "a", (3, 4, 5, 6, 7, 8), ((1, 6),), None)
    bad = Record(1, 9, "b", (3, 77, 5, 6, 7, 8), ((1, 6),), None)
    with pytest.raises(CacheError, match="line 9"):
        states(records=[good, bad]).build()
    assert not list(tmp_path.rglob("*.bin"))
    invalid = states(records=[bad], file="mine.jsonl", remedy="Drop it")
    with pytest.raises(CacheError, match=r"mine\.jsonl, line 9: .* Drop it"):
        invalid.build()
