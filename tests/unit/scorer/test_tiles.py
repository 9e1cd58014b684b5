"""Tile sizes keep within registers and shared memory; splits fill a GPU without overfilling it."""

import pytest

from vllm_medusa.scorer.tiles import MAX_SPLITS, SHARED_BYTES, num_splits, padded_head, tile_sizes

HEAD_SIZES = (64, 80, 96, 112, 128, 160, 192, 256)


@pytest.mark.parametrize("shared", [64 * 1024, SHARED_BYTES, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize(("query", "key"), [(2, 2), (2, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_tiles_fit(head_size, query, key, shared):
    dim = padded_head(head_size)
    for rows in (1, 5, 16, 17, 64, 100, 4096):
        tiles = tile_sizes(head_size, rows, query, key, shared)
        for size in (tiles.block_m, tiles.block_n):
            assert size >= 16 and size & (size - 1) == 0
        assert 64 % tiles.block_n == 0  # never two words of an ancestor mask
        assert tiles.block_m * dim <= 64 * 32 * tiles.num_warps  # accumulators of a thread
        used = dim * (tiles.block_m * query + 2 * tiles.num_stages * tiles.block_n * query)
        assert used <= shared
        assert tiles.block_m >= min(rows, 128 if (query == 2 and dim <= 128) else 16)


def test_few_rows_get_small_tiles_and_heads_are_padded():
    rows = [tile_sizes(128, r, 2, 2).block_m for r in (1, 16, 17, 64, 65, 999)]
    assert rows == [16, 16, 32, 64, 128, 128]
    heads = [padded_head(d) for d in (1, 16, 17, *HEAD_SIZES)]
    assert heads == [16, 16, 32, 64, 128, 128, 128, 128, 256, 256, 256]


def test_one_request_with_a_long_context_fills_the_gpu():
    for kv_heads, sms in ((8, 132), (32, 132), (1, 108), (8, 108)):
        splits = num_splits(1, kv_heads, 32768, sms)
        assert 0.8 * sms < splits * kv_heads <= sms or splits == MAX_SPLITS


def test_full_batches_and_short_contexts_are_not_split():
    assert num_splits(64, 8, 32768, 132) == 1
    assert num_splits(1, 8, 64, 132) == 1
    assert num_splits(1, 8, 1, 132) == 1
    assert num_splits(0, 8, 0, 132) == 1


def test_splits_are_bounded_and_never_more_than_tiles():
    for batch in (1, 2, 3, 7, 16, 100):
        for length in (1, 64, 65, 1000, 4096, 10**6):
            for query_tiles in (1, 4):
                splits = num_splits(batch, 4, length, 132, query_tiles)
                assert 1 <= splits <= min(MAX_SPLITS, max(1, -(-length // 64)))


def test_more_requests_never_mean_more_splits_at_powers_of_two():
    splits = [num_splits(b, 8, 8192, 128) for b in (1, 2, 4, 8, 16)]
    assert splits == sorted(splits, reverse=True) and splits[0] == 16 and splits[-1] == 1
