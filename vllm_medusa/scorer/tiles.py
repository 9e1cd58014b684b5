"""Work division of the Triton attention: tile sizes, and the number of key parts.

Pure functions of numbers known on the host (shapes and upper bounds), so that a captured CUDA
graph never depends on lengths on the device. The constants are derived from register
and shared-memory sizes; none was tuned on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_SPLITS = 64  # the merge keeps one row of every part in registers
FEWEST_SPLITS = 16  # fewer are padded with empty ones, to compile fewer kernels
LARGEST_BLOCK_M = 128

# In units of a multiprocessor's time for one key tile.
START_COST = 1  # a program's first loads
MERGE_COST = 3  # an additional kernel


class DeviceLimits(NamedTuple):
    """Device limits for tiles and splits; defaults hold for every CUDA GPU since Ampere."""

    num_sms: int = 1
    shared_bytes: int = 99 * 1024  # per block; a multiprocessor has 1 KB more
    async_mma: bool = False  # data center GPUs from Hopper on: products read shared memory


@dataclass(frozen=True)
class Tiles:
    """Work of one program: ``block_m`` rows (query row x head), ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int = 1  # concurrent programs per multiprocessor


def padded_head(head_size: int) -> int:
    """The next power of two, at least 16, as required by matrix products."""
    return max(16, 1 << (head_size - 1).bit_length())


def tile_sizes(
    head_size: int,  # channels of one head, up to 256
    rows: int,  # upper bound of query rows x query heads of one key head in one request
    query_bytes: int,  # of one element
    key_bytes: int,  # of one element of the cache
    device: DeviceLimits,
) -> Tiles:
    """Choose the tiles of one launch.

    Registers: the accumulator is ``block_m * padded_head`` fp32 values, at most 64 per thread. fp32
    products run on the ordinary cores, fully unrolled: an eighth of that, or the compiler spills
    hundreds of bytes per thread. A thread has up to 255 registers, so two programs of
    four warps fit on a multiprocessor. This has priority, then prefetching further ahead:
    `shared_bytes`.
    """
    dim = padded_head(head_size)
    exact = query_bytes == 4
    max_block = max(16, min(64 if exact else LARGEST_BLOCK_M, (2048 if exact else 16384) // dim))
    block_m = min(max_block, max(16, 1 << (rows - 1).bit_length()))
    # a key tile must not straddle two words of an ancestor mask: at most 64 keys, a power of two
    block_n = (32 if dim <= 128 else 16) if exact else (64 if dim <= 128 else 32)
    num_warps = 8 if exact or block_m == 128 or block_m * dim > 8192 else 4

    def fits(num_stages: int, per_sm: int = 1) -> bool:
        used = shared_bytes(
            dim, block_m, block_n, num_stages, query_bytes, key_bytes, device.async_mma
        )
        return used <= (device.shared_bytes + 1024) // per_sm - 1024

    for per_sm in (2, 1) if num_warps == 4 else (1,):
        for num_stages in (3,) if exact else (5, 3):
            if fits(num_stages, per_sm):
                return Tiles(block_m, block_n, num_warps, num_stages, per_sm)
    while block_n > 16 and not fits(1):
        block_n //= 2
    return Tiles(block_m, block_n, num_warps, 1)


def shared_bytes(
    dim: int,
    block_m: int,
    block_n: int,
    num_stages: int,
    query_bytes: int,
    key_bytes: int,
    async_mma: bool,
) -> int:
    """Shared memory of a program; an upper bound, which tests compare with Triton's usage.

    Key addresses come from the block table, so a tile needs two dependent loads,
    among which Triton's pipeliner divides the stages: 3 and 4 prefetch keys and values one tile
    ahead, 5 and 6 two. Products that overlap the next prefetch need one more tile. Keys
    of fewer bytes (fp8) go through registers; asynchronous products then need a copy in shared
    memory, in the dtype of the queries.
    """
    tile = 2 * block_n * dim
    ahead = 0 if num_stages == 1 else max(1, (num_stages - 1) // 2)
    used = block_m * dim * query_bytes + max(1, ahead) * tile * key_bytes
    async_mma = async_mma and query_bytes < 4  # fp32 uses the ordinary cores
    if async_mma and (ahead or key_bytes != query_bytes):
        used += tile * query_bytes
    if not async_mma:  # weights change layout between the products
        used += block_m * block_n * query_bytes
    return used + 2560 * max(1, ahead)  # blocks, slots, depths and mask words


def num_splits(
    programs: int,  # requests (with padding) x key heads of this device x tiles of query rows
    max_seq_len: int,  # tokens of the longest request
    num_sms: int,  # multiprocessors of the device
    tiles: Tiles,
    key_bytes: int,  # of one element of the cache
) -> int:
    """Number of parts to split the keys into, so that a small batch still fills the GPU.

    The smallest number of parts within 5 % of the lowest cost, if every multiprocessor
    runs ``tiles.per_sm`` programs at a time and a program costs its key tiles plus a start. A part
    is written and read again, in fp32. All arguments are upper bounds; a request shorter than
    ``max_seq_len`` leaves its last parts empty.
    """
    programs = max(1, programs)
    key_tiles = max(1, -(-max_seq_len // tiles.block_n))
    part = 4 * tiles.block_m / (2 * tiles.block_n * key_bytes)  # its bytes, in key tiles

    def cost(splits: int) -> float:
        waves = -(-programs * splits // (num_sms * tiles.per_sm))
        program = tiles.per_sm * -(-key_tiles // splits) + START_COST
        if splits == 1:
            return waves * program
        merge = programs * splits / num_sms * part + MERGE_COST
        return waves * (program + tiles.per_sm * part) + merge

    costs = [cost(splits) for splits in range(1, min(MAX_SPLITS, key_tiles) + 1)]
    enough = min(costs) * 1.05
    return next(splits for splits, price in enumerate(costs, 1) if price <= enough)
