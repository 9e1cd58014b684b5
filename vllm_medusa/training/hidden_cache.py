"""The frozen target's hidden states, computed once.

A folder of shards, each with the rows of complete records. A shard has a file for the inputs of
the LM head and, for EAGLE-3, one per target layer, each [n, H] in one dtype and nothing else,
memory-mapped when read: runs of several methods share them. The folder's name and its ``key.json``
identify the target and the texts, so no other run reads it. A file is written under a temporary
name and renamed, so it is always complete, and building resumes with the missing ones. Two runs
that build the same folder concurrently write the same bytes. Without a folder the states are kept
in memory.

Records are kept in order as long as they fit ``max_bytes``; the others are computed when they are
read, one pass per record for all its pieces, which `groups` keeps together.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.files import digest_json, free_bytes, new_path, write_json
from vllm_medusa.offline.records import Record, digest_of
from vllm_medusa.training.rows import Piece, pad

_REMEDY = "Try another --dtype, or drop the line."


class CacheError(ValueError):
    """Hidden states that can't be stored or computed."""


class HiddenStates:
    """States of a range of rows of each record."""

    def __init__(
        self,
        target: Any,  # a `Target`, or `eagle3.AuxiliaryStates`
        records: Sequence[Record],
        ranges: Sequence[Sequence[int]],  # rows [start, end) of each record; empty: none
        folder: Path | None = None,  # parent of the cache's folder; None: in memory
        key: Mapping[str, Any] | None = None,  # plain JSON: the target and its settings
        *,
        dtype: torch.dtype,  # of the stored states, one of `target.DTYPES`
        max_bytes: int = 1 << 62,
        shard_bytes: int = 256 << 20,  # approximate
        forward_tokens: int = 4096,  # per pass of the target, padding included
        file: str | Path = "",  # records file, for messages
        remedy: str = _REMEDY,  # for non-finite states
    ) -> None:
        """Plan the shards; nothing is written yet."""
        self.target, self.records, self.dtype = target, records, dtype
        self.forward_tokens, self._file, self._remedy = forward_tokens, file, remedy
        self.ranges = np.array(ranges, np.int64).reshape(-1, 2)
        self._names: tuple[str, ...] = target.state_names
        self._width = target.hidden_size // len(self._names)
        self._file_row = self._width * dtype.itemsize
        self._row_bytes = target.hidden_size * dtype.itemsize
        rows = self.ranges[:, 1] - self.ranges[:, 0]
        ends = np.cumsum(rows)
        self.num_kept = int(np.searchsorted(ends * self._row_bytes, max_bytes, "right"))
        shard = (ends - rows)[: self.num_kept] * self._file_row // shard_bytes
        first = np.flatnonzero(np.diff(shard, prepend=-1))  # each shard's first record
        self._shards = [*first.tolist(), self.num_kept]
        self._first_rows = np.concatenate([[0], ends])
        self.needed_bytes = int(self._first_rows[-1]) * self._row_bytes
        self.cached_bytes = int(self._first_rows[self.num_kept]) * self._row_bytes
        self.folder: Path | None = None
        if folder is not None:
            plan = [self._shards, forward_tokens, digest_json(self.ranges.tolist())]
            whole = {**(key or {}), "texts": digest_of(records), "dtype": str(dtype), "plan": plan}
            self._key = json.loads(json.dumps(whole))
            self.folder = folder / f"hidden-{digest_json(self._key)[:16]}"
        self._kept: dict[int, list[Tensor]] = {}  # shards in memory, or mapped

    def missing(self) -> list[int]:
        """Shards that have to be built."""
        shards = range(len(self._shards) - 1)
        return [i for i in shards if i not in self._kept and self._absent(i)]

    def _check_space(self, folder: Path) -> None:
        wanted = sum(
            self._num_rows(shard) * self._file_row * len(self._absent(shard))
            for shard in self.missing()
        )
        free = free_bytes(folder)
        if wanted > free:
            raise CacheError(
                f"the hidden states take {wanted / 1e9:.1f} GB, but the disk of {folder} "
                f"has {free / 1e9:.1f} GB free. Limit them with --cache-gb (the rest is computed "
                "when needed), or set --cache to another disk."
            )

    def build(
        self, done: Callable[[int, int], None] | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        """Compute the missing shards; processes that share the folder share the work.

        ``done`` is called with the number of finished rows and the total.

        Raises:
            CacheError: states that are not finite in this dtype, with the record's line; or the
                disk has not enough free space for the missing shards.

        """
        todo = [shard for shard in self.missing() if shard % world == rank]
        tag = f"part-{os.getpid()}"  # of temporary files
        if todo and self.folder is not None:
            self._check_space(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "key.json", self._key, tag)
        total, ready = sum(map(self._num_rows, todo)), 0
        for shard in todo:
            states = torch.empty(self._num_rows(shard), self.target.hidden_size, dtype=self.dtype)
            base = self._first_rows[self._shards[shard]]
            for record, found in self._computed(range(*self._shards[shard : shard + 2])):
                first, stop = self._first_rows[record : record + 2] - base
                states[first:stop] = found[slice(*self.ranges[record])]
                ready += int(stop - first)
                if done is not None:
                    done(ready, total)
            columns = states.split(self._width, 1)
            if self.folder is None:
                self._kept[shard] = list(columns)
                continue
            for number in self._absent(shard):
                with new_path(self._path(shard, number), tag) as part:
                    columns[number].contiguous().view(torch.uint8).numpy().tofile(part)

    def read(self, wanted: Sequence[tuple[int, int, int]]) -> Tensor:
        """States of (record, first row, last row + 1), concatenated.

        Returns:
            fp32 [n, H] on the CPU, or on the target's device if any was computed.

        """
        fresh: dict[int, Tensor] = {}
        device = torch.device("cpu")
        if beyond := sorted({r for r, _, _ in wanted if r >= self.num_kept}):
            fresh = dict(self._computed(beyond))
            device = next(iter(fresh.values())).device
        parts = []
        for record, start, stop in wanted:
            if record in fresh:
                parts.append(fresh[record][start:stop])
            else:
                shard = int(np.searchsorted(self._shards, record, "right")) - 1
                at = self._first_rows[record] - self._first_rows[self._shards[shard]]
                at -= self.ranges[record, 0]
                rows = [column[at + start : at + stop] for column in self._mapped(shard)]
                parts.append(torch.cat(rows, 1).to(device))
        return torch.cat(parts).float()

    def groups(self, pieces: Sequence[Piece]) -> list[int]:
        """A number for each piece: its own if its states are stored, else one per record."""
        numbers: dict[tuple[int, int], int] = {}
        keys = ((p.record, p.start if p.record < self.num_kept else -1) for p in pieces)
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def remove(self) -> None:
        """Delete the files."""
        self._kept.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _num_rows(self, shard: int) -> int:
        first, stop = self._first_rows[self._shards[shard : shard + 2]]
        return int(stop - first)

    def _path(self, shard: int, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{shard:06d}-{self._names[number]}.bin"

    def _absent(self, shard: int) -> list[int]:
        """The numbers of the shard's files that are not there."""
        numbers, size = range(len(self._names)), self._num_rows(shard) * self._file_row
        if self.folder is None:
            return list(numbers)
        paths = [self._path(shard, number) for number in numbers]
        return [n for n in numbers if not paths[n].is_file() or paths[n].stat().st_size != size]

    def _mapped(self, shard: int) -> list[Tensor]:
        if shard not in self._kept:
            shape = (self._num_rows(shard), self._width)
            size = shape[0] * shape[1]
            paths = [str(self._path(shard, number)) for number in range(len(self._names))]
            files = [torch.from_file(path, size=size, dtype=self.dtype) for path in paths]
            self._kept[shard] = [file.view(shape) for file in files]
        return self._kept[shard]

    @torch.no_grad()
    def _computed(self, records: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """States of whole records, [tokens, H] each in this cache's dtype, longest first."""
        ends = {record: int(self.ranges[record, 1]) for record in records}
        waiting = sorted((r for r in records if ends[r]), key=lambda r: (-ends[r], r))
        while waiting:
            count = max(1, self.forward_tokens // ends[waiting[0]])
            batch, waiting = waiting[:count], waiting[count:]
            ids, mask = pad([self.records[r].token_ids[: ends[r]] for r in batch])
            device = self.target.device
            states = self.target.hidden_states(ids.to(device), mask.to(device)).to(self.dtype)
            for row, record in enumerate(batch):
                found = states[row, : ends[record]]
                if not bool(found.isfinite().all()):
                    where = f"{self._file}, " if self._file else ""
                    raise CacheError(
                        f"{where}line {self.records[record].line}: the target's hidden states are "
                        f"not finite in {self.dtype}. {self._remedy}"
                    )
                yield record, found
