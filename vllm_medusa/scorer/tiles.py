"""How the Triton attention cuts its work: tile sizes, and into how many parts the keys go.

Pure functions of numbers that the host knows (shapes and upper bounds), so that a captured CUDA
graph never depends on a length that lives on the device. The constants are derived from register
and shared-memory sizes; none was tuned on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

# What every CUDA GPU since compute capability 8.0 lets one block have.
SHARED_BYTES = 99 * 1024
MAX_SPLITS = 64  # the merge holds one row of every part in registers
FEWEST_SPLITS = 16  # a merge of fewer is one of 16 with empty ones: a kernel less to compile
LARGEST_BLOCK_M = 128

# In units of the time that one key tile takes.
START_COST = 2  # a program's first loads, and writing its part
MERGE_COST = 6  # one more kernel, and reading the parts back


@dataclass(frozen=True)
class Tiles:
    """One program's share: ``block_m`` rows (query row x head), ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_head(head_size: int) -> int:
    """The next power of two, at least 16: what a matrix product can take."""
    return max(16, 1 << (head_size - 1).bit_length())


def tile_sizes(
    head_size: int,
    rows: int,
    query_bytes: int,
    key_bytes: int,
    shared_bytes: int = SHARED_BYTES,
) -> Tiles:
    """Choose the tiles of one launch.

    Registers: the accumulator is ``block_m * padded_head`` fp32 values, at most 64 a thread. fp32
    products run on the ordinary cores, fully unrolled: an eighth of that, or the compiler keeps
    hundreds of bytes a thread in memory. Shared memory: the queries once, and the keys and values
    once a pipeline stage.

    Args:
        head_size: Channels of one head, up to 256.
        rows: Upper bound of query rows x query heads of one key head in one request.
        query_bytes: Bytes of one query element.
        key_bytes: Bytes of one element of the cache.
        shared_bytes: Shared memory that one block may have.

    """
    dim = padded_head(head_size)
    exact = query_bytes == 4
    most = max(16, min(64 if exact else LARGEST_BLOCK_M, (2048 if exact else 16384) // dim))
    block_m = min(most, max(16, 1 << (rows - 1).bit_length()))
    # a key tile never straddles two words of an ancestor mask: at most 64 keys, a power of two
    block_n = (32 if dim <= 128 else 16) if exact else (64 if dim <= 128 else 32)

    def shared(block_m: int, block_n: int, stages: int) -> int:
        return dim * (block_m * query_bytes + 2 * stages * block_n * max(key_bytes, query_bytes))

    stages = 3
    while stages > 1 and shared(block_m, block_n, stages) > shared_bytes:
        stages -= 1
    while block_n > 16 and shared(block_m, block_n, stages) > shared_bytes:
        block_n //= 2
    many = exact or block_m == 128 or block_m * dim > 8192
    return Tiles(block_m, block_n, 8 if many else 4, stages)


def num_splits(
    batch: int,
    kv_heads: int,
    max_seq_len: int,
    num_sms: int,
    query_tiles: int = 1,
    block_n: int = 64,
) -> int:
    """Into how many parts to cut the keys so that a small batch still fills the GPU.

    The least number of parts that comes within 5 % of the least cost, where every multiprocessor
    runs one program at a time and a program costs its key tiles plus a start. All arguments are
    upper bounds; a request shorter than ``max_seq_len`` leaves its last parts empty.

    Args:
        batch: Requests, padding included.
        kv_heads: Key heads on this device.
        max_seq_len: Tokens of the longest request.
        num_sms: Multiprocessors of the device.
        query_tiles: Tiles that the query rows of one request and key head take.
        block_n: Keys of one tile.

    """
    programs = max(1, batch * kv_heads * query_tiles)
    tiles = max(1, -(-max_seq_len // block_n))

    def cost(splits: int) -> int:
        waves = -(-programs * splits // num_sms)
        return waves * (-(-tiles // splits) + START_COST) + (MERGE_COST if splits > 1 else 0)

    costs = [cost(splits) for splits in range(1, min(MAX_SPLITS, tiles) + 1)]
    enough = min(costs) * 1.05
    return next(splits for splits, price in enumerate(costs, 1) if price <= enough)
