"""Tile sizes fit into registers and shared memory; splits fill a GPU without overfilling it."""

import pytest
import torch

from vllm_medusa import kernels
from vllm_medusa.scorer.paged import SplitWorkspace
from vllm_medusa.scorer.tiles import (
    MAX_SPLITS,
    DeviceLimits,
    Tiles,
    num_splits,
    padded_head,
    shared_bytes,
    tile_sizes,
)

HEAD_SIZES = (64, 80, 96, 112, 128, 160, 192, 256)
H100 = DeviceLimits(132, 227 * 1024, async_mma=True)
DEVICES = [DeviceLimits(1, 64 * 1024), DeviceLimits(), DeviceLimits(108, 163 * 1024), H100]
ALONE, PAIRED = Tiles(128, 64, 8, 5), Tiles(64, 64, 4, 3, per_sm=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("query", "key"), [(2, 2), (2, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_tiles_fit(head_size, query, key, device):
    dim = padded_head(head_size)
    for rows in (1, 5, 16, 17, 64, 100, 4096):
        tiles = tile_sizes(head_size, rows, query, key, device)
        for size in (tiles.block_m, tiles.block_n):
            assert size >= 16 and size & (size - 1) == 0
        assert 64 % tiles.block_n == 0  # never two words of an ancestor mask
        assert tiles.block_m * dim <= 64 * 32 * tiles.num_warps  # accumulators per thread
        assert 255 * 32 * tiles.num_warps * tiles.per_sm <= 65536  # registers per multiprocessor
        sizes = dim, tiles.block_m, tiles.block_n, tiles.num_stages
        used = shared_bytes(*sizes, query, key, device.async_mma)
        assert tiles.per_sm * (used + 1024) <= device.shared_bytes + 1024
        assert tiles.num_stages >= 3 or device.shared_bytes == 64 * 1024
        assert tiles.block_m >= min(rows, 128 if (query == 2 and dim <= 128) else 16)


def test_two_programs_are_preferred_to_prefetching():
    assert tile_sizes(128, 64, 2, 2, H100) == PAIRED  # with 5 stages only one would fit
    assert tile_sizes(128, 256, 2, 2, H100) == ALONE
    assert tile_sizes(128, 64, 2, 1, H100) == Tiles(64, 64, 4, 5, per_sm=2)


def test_few_rows_get_small_tiles_and_heads_are_padded():
    rows = [tile_sizes(128, r, 2, 2, H100).block_m for r in (1, 16, 17, 64, 65, 999)]
    assert rows == [16, 16, 32, 64, 128, 128]
    heads = [padded_head(d) for d in (1, 16, 17, *HEAD_SIZES)]
    assert heads == [16, 16, 32, 64, 128, 128, 128, 128, 256, 256, 256]


def splits_of(programs: int, length: int, sms: int = 132, tiles: Tiles = ALONE) -> int:
    return num_splits(programs, length, sms, tiles, 2)


def test_one_request_with_a_long_context_fills_the_gpu():
    for programs, sms in ((8, 132), (32, 132), (1, 108), (8, 108)):
        for tiles in (ALONE, PAIRED):
            splits, slots = splits_of(programs, 32768, sms, tiles), sms * tiles.per_sm
            assert 0.8 * slots < splits * programs <= slots or splits == MAX_SPLITS
    assert splits_of(32, 4160, tiles=PAIRED) == 8  # 256 of 264 slots


def test_full_batches_and_short_contexts_are_not_split():
    assert splits_of(512, 32768) == 1
    assert splits_of(8, 64) == 1
    assert splits_of(8, 1) == 1
    assert splits_of(0, 0) == 1


def test_the_cost_of_parts_depends_on_their_size():
    """Four programs of 128 rows each, as in a 70B model on 8 GPUs, write 256 KB of parts per split.

    So few keys are not split as finely as slots would allow; one-byte keys count half.
    """
    assert splits_of(4, 4160) == 22 < 132 // 4
    assert splits_of(4, 4160, tiles=Tiles(16, 64, 4, 5)) == 33  # parts of 16 rows cost little
    assert num_splits(4, 4160, 132, ALONE, 1) < 22


def test_splits_are_bounded_and_never_more_than_tiles():
    for batch in (1, 2, 3, 7, 16, 100):
        for length in (1, 64, 65, 1000, 4096, 10**6):
            for query_tiles in (1, 4):
                splits = splits_of(batch * 4 * query_tiles, length)
                assert 1 <= splits <= min(MAX_SPLITS, max(1, -(-length // 64)))


def test_a_gpu_requires_triton(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="Medusa on cuda requires Triton"):
        kernels.uses_kernel.__wrapped__("cuda")


def test_workspace_may_be_created_in_inference_mode():
    with torch.inference_mode():
        space = SplitWorkspace.allocate(10, 16, "cpu")
    space.values.fill_(0.0)
    space.lse.fill_(0.0)


def test_workspace_states_its_number_of_parts():
    space = SplitWorkspace.allocate(100, 16, "cpu")
    assert space.max_splits(5, 4, 16) == 5
    assert space.max_splits(5, 4, 32) == 2  # layers with wider heads
    assert space.max_splits(5, 4, 8) == 5
    assert space.max_splits(1000, 4, 16) == space.max_splits(1000, 4, 64) == 1
    assert space.max_splits(0, 4, 16) == 100
