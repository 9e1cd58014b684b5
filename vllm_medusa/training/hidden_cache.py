"""The frozen target's hidden states, computed once and kept in files.

A folder of shards, each the rows of some whole records one behind the other, [n, H] in one dtype
and nothing else, mapped into memory when read. The folder's name and its ``key.json`` say of which
target and texts it is, so that no other run ever reads it. A shard is written aside, synced and
renamed: what has its name is whole. Building goes on with the shards that lack.

Several runs may share a folder: whoever builds and reads it holds a shared lock on ``lock`` in it,
and it is removed only by who gets the exclusive one, renamed first, so that a folder that still has
its name is whole. Whoever is alone in it clears away what killed runs left.

The disk is bounded: records are cached in order as long as they fit; what is beyond is computed
whenever it is trained on (one pass over a text for all its pieces, which `groups` keeps together).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.files import digest_json, free_bytes, new_path, try_lock, write_json
from vllm_medusa.training.batches import pad
from vllm_medusa.training.texts import Piece, Texts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WORDS = {4: (np.int32, torch.int32), 2: (np.int16, torch.int16)}  # by size: how files are mapped
_VERSION = 1
_REMEDY = "Try another --dtype or --cache-dtype, or drop the line."


class CacheError(ValueError):
    """Hidden states that can't be kept or computed."""


class StateSource(Protocol):
    """What computes states: a `Target`, or what gives wider ones of it."""

    @property
    def hidden_size(self) -> int:
        """How wide they are."""

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Of ids int64 [B, L], padded on the right: [B, L, width]."""


class HiddenStates:
    """The states of all rows of some texts, from files or from the target."""

    def __init__(
        self,
        target: StateSource,
        texts: Texts,
        folder: Path,  # where the folder of this cache goes
        key: Mapping[str, Any],  # tells the target and how it computes from any other, plain JSON
        *,
        dtype: torch.dtype,  # of the kept states, one of `DTYPES`
        max_bytes: int,  # how much may be kept
        shard_bytes: int = 256 << 20,  # about
        forward_tokens: int = 4096,  # of a pass of the target, padding included
        file: str | Path = "",  # what the texts' lines are of, for messages
        remedy: str = _REMEDY,  # for states that aren't finite
    ) -> None:
        """Plan the shards; nothing is written yet.

        The texts, the dtype and the plan are added to the key.
        """
        self._file, self._remedy = str(file), remedy
        self.target, self.texts, self.dtype = target, texts, dtype
        self.forward_tokens = forward_tokens
        self._row_bytes = target.hidden_size * dtype.itemsize
        self.needed_bytes = texts.num_rows * self._row_bytes  # what all rows take
        record_rows = np.bincount(
            texts.span_record, np.diff(texts.first_row), minlength=texts.num_records
        ).astype(np.int64)
        ends = np.cumsum(record_rows)  # of each record's rows
        self._cached_records = int(np.searchsorted(ends * self._row_bytes, max_bytes, "right"))
        cached = ends[: self._cached_records]
        # what is, or will be, kept
        self.cached_bytes = int(cached[-1]) * self._row_bytes if len(cached) else 0
        shard_of = (cached - record_rows[: len(cached)]) * self._row_bytes // shard_bytes
        first = np.flatnonzero(np.diff(shard_of, prepend=-1))  # each shard's first record
        self._shards = [*first.tolist(), self._cached_records]
        self._first_rows = np.concatenate([[0], ends])[self._shards]
        whole_key = {
            **key,
            "texts": texts.digest(),
            "dtype": str(dtype),
            "plan": [self._shards, forward_tokens],
            "version": _VERSION,
        }
        self._key: dict[str, Any] = json.loads(json.dumps(whole_key))
        self.folder = folder / f"hidden-{digest_json(self._key)[:16]}"
        self._tag = f"part-{os.getpid()}"  # of files aside
        self._maps: dict[int, Tensor] = {}
        self._lock: IO[bytes] | None = None

    @property
    def num_shards(self) -> int:
        """How many files there are when all are built."""
        return len(self._shards) - 1

    def missing(self) -> list[int]:
        """Shards that have to be built yet."""
        return [i for i in range(self.num_shards) if not self._is_whole(i)]

    @property
    def missing_bytes(self) -> int:
        """What building adds to the disk."""
        return sum(self._bytes(shard) for shard in self.missing())

    def check_space(self, others: int = 0) -> None:
        """Refuse to start what the disk can't hold; ``others`` bytes are wanted beside it.

        Raises:
            CacheError: there is less free space than the missing shards take.

        """
        free = free_bytes(self.folder)
        wanted = others + self.missing_bytes
        if wanted > free:
            raise CacheError(
                f"the hidden states take {wanted / 1e9:.1f} GB, and the disk of {self.folder} "
                f"has {free / 1e9:.1f} GB free. Bound them with --cache-gb (the rest is computed "
                "whenever it is needed), or name another disk with --cache."
            )

    def build(
        self, done: Callable[[int, int], None] | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        """Compute the missing shards; of several processes each builds its share.

        All of them have to see the folder. ``done`` is called with how many rows are done and how
        many there are to do.

        Raises:
            CacheError: states that aren't finite in this dtype, the record's line named.

        """
        if self.num_shards:
            self._hold()
        todo = [shard for shard in self.missing() if shard % world == rank]
        if not todo:
            return
        if not (self.folder / "key.json").exists():
            write_json(self.folder / "key.json", self._key, self._tag)
        total, ready = sum(self._rows(shard) for shard in todo), 0
        for shard in todo:
            states = torch.empty(self._rows(shard), self.target.hidden_size, dtype=self.dtype)
            base = self._first_rows[shard]
            for record, found in self._computed(range(*self._shards[shard : shard + 2])):
                for span in self._spans(record):
                    first, stop = self.texts.first_row[span : span + 2]
                    at = int(self.texts.span_position[span])
                    states[first - base : stop - base] = found[at : at + stop - first]
                    ready += int(stop - first)
                if done is not None:
                    done(ready, total)
            self._write(shard, states)

    def read(self, wanted: Sequence[tuple[int, int, int]]) -> Tensor:
        """States of some spans' rows, (span, first row, last row + 1) each, one behind the other.

        Returns:
            fp32 [n, H] on the CPU, or wherever the target computes if any was computed.

        """
        fresh: dict[int, Tensor] = {}
        device = torch.device("cpu")
        records = {int(self.texts.span_record[span]) for span, _, _ in wanted}
        if beyond := sorted(r for r in records if r >= self._cached_records):
            fresh = dict(self._computed(beyond))
            device = next(iter(fresh.values())).device
        parts = []
        for span, start, stop in wanted:
            record = int(self.texts.span_record[span])
            if record in fresh:
                at = int(self.texts.span_position[span])
                parts.append(fresh[record][at + start : at + stop])
            else:
                first = int(self.texts.first_row[span])
                shard = int(np.searchsorted(self._first_rows, first, "right")) - 1
                first -= int(self._first_rows[shard])
                kept = self._mapped(shard)[first + start : first + stop]
                parts.append(kept.to(device))
        return torch.cat(parts).float()

    def groups(self, pieces: Sequence[Piece]) -> list[int]:
        """A number for each piece: its own if it is cached, else its record's."""
        numbers: dict[tuple[str, int], int] = {}
        groups = []
        for place, piece in enumerate(pieces):
            record = self.texts.record_of(piece)
            key = ("piece", place) if record < self._cached_records else ("record", record)
            groups.append(numbers.setdefault(key, len(numbers)))
        return groups

    def release(self) -> None:
        """Let others remove the files; they may be read again after another `build`."""
        self._maps.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the files, unless another process still holds them."""
        self.release()
        try:
            lock = (self.folder / "lock").open("ab")
        except FileNotFoundError:  # nothing was built
            return
        with lock:
            if self._locked(lock):
                aside = self.folder.with_name(f"{self.folder.name}.removed-{os.getpid()}")
                self.folder.replace(aside)
                shutil.rmtree(aside, ignore_errors=True)

    def _hold(self) -> None:
        """Make the folder and keep others from removing it."""
        while self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = (self.folder / "lock").open("ab")
            except FileNotFoundError:  # removed meanwhile
                continue
            if self._locked(lock):  # nobody else is here
                for part in self.folder.glob("*.part-*"):
                    part.unlink()
                for removed in self.folder.parent.glob(f"{self.folder.name}.removed-*"):
                    shutil.rmtree(removed, ignore_errors=True)
            if self._locked(lock, shared=True):
                self._lock = lock
            else:  # somebody removes the folder
                lock.close()
                time.sleep(0.01)

    def _locked(self, lock: IO[bytes], *, shared: bool = False) -> bool:
        """Lock a file; whether that was granted, and it is still the folder's."""
        try:
            if not try_lock(lock, shared=shared):
                return False
            return os.path.samestat(os.fstat(lock.fileno()), (self.folder / "lock").stat())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise CacheError(
                f"{self.folder}: files can't be locked there ({error}), so another run could "
                "remove them. Name another disk with --cache."
            ) from error

    def _spans(self, record: int) -> range:
        return range(*np.searchsorted(self.texts.span_record, [record, record + 1]))

    def _rows(self, shard: int) -> int:
        return int(self._first_rows[shard + 1] - self._first_rows[shard])

    def _bytes(self, shard: int) -> int:
        return self._rows(shard) * self._row_bytes

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}.bin"

    def _is_whole(self, shard: int) -> bool:
        path = self._path(shard)
        return path.is_file() and path.stat().st_size == self._bytes(shard)

    def _write(self, shard: int, states: Tensor) -> None:
        _, word = _WORDS[self.dtype.itemsize]
        with new_path(self._path(shard), self._tag) as part:
            states.view(word).numpy().tofile(part)

    def _mapped(self, shard: int) -> Tensor:
        if shard not in self._maps:
            kind, _ = _WORDS[self.dtype.itemsize]
            array = np.memmap(self._path(shard), kind, "c")  # never written; "r" makes torch warn
            states = torch.from_numpy(array).view(self.dtype)
            self._maps[shard] = states.view(-1, self.target.hidden_size)
        return self._maps[shard]

    @torch.no_grad()
    def _computed(self, records: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """States of whole records, [tokens, H] each in this cache's dtype, longest first."""
        texts = {record: self.texts.token_ids(record) for record in records}
        waiting = sorted((r for r in records if len(texts[r])), key=lambda r: (-len(texts[r]), r))
        while waiting:
            count = max(1, self.forward_tokens // len(texts[waiting[0]]))
            batch, waiting = waiting[:count], waiting[count:]
            ids, mask = pad([texts[record] for record in batch])
            device = self.target.device
            states = self.target.hidden_states(ids.to(device), mask.to(device)).to(self.dtype)
            for row, record in enumerate(batch):
                found = states[row, : len(texts[record])]
                if not bool(found.isfinite().all()):
                    where = f"{self._file}, " if self._file else ""
                    raise CacheError(
                        f"{where}line {self.texts.lines[record]}: the target's hidden states are "
                        f"not finite in {self.dtype}. {self._remedy}"
                    )
                yield record, found
