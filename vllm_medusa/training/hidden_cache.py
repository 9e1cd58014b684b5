"""The frozen target's hidden states, computed once.

They are in a folder of shards, each with the rows of complete texts. A shard has a file for the
inputs of the LM head and, for EAGLE-3, one per target layer, which runs of different methods share.
A file is a plain [n, H] array, memory-mapped when read. The folder's name is a digest of the target
and the texts, so no other run reads it. A file is written under a temporary name and renamed, so it
is always complete, and building resumes with the missing ones. Two runs that build the same folder
concurrently write the same bytes. Without a folder the states are kept in memory.

States of texts are stored in order, up to ``max_bytes``; those of the other texts are computed when
they are read, in one pass per text for all its pieces, which `groups` keeps together.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.files import digest_json, free_bytes, new_path
from vllm_medusa.offline.records import digest_of
from vllm_medusa.training.rows import Piece, Texts, pad


class CacheError(ValueError):
    """Hidden states that can't be stored or computed."""


class HiddenStates:
    """States of the rows of some pieces."""

    def __init__(
        self,
        target: Any,  # a `Target`, or `eagle3.AuxiliaryStates`
        texts: Texts,
        pieces: Sequence[Piece],  # rows to compute, up to each piece's limit
        folder: Path | None = None,  # parent of the cache's folder; None: in memory
        key: Mapping[str, Any] | None = None,  # plain JSON: the target and its settings
        *,
        dtype: torch.dtype,  # of the stored states, one of `target.DTYPES`
        max_bytes: int = 1 << 62,
        shard_bytes: int = 256 << 20,  # approximate
        forward_tokens: int = 4096,  # per pass of the target, padding included
        file: str | Path = "",  # records file, for messages
        remedy: str = "Try another --dtype, or drop the line.",  # for non-finite states
    ) -> None:
        """Plan the shards; nothing is written yet."""
        self.target, self.texts, self.dtype = target, texts, dtype
        self.forward_tokens, self._file, self._remedy = forward_tokens, file, remedy
        self._names: tuple[str, ...] = target.state_names
        self._width = target.hidden_size // len(self._names)
        self._file_row = self._width * dtype.itemsize
        row_bytes = target.hidden_size * dtype.itemsize

        first = texts.first
        starts, _, limits = np.array(pieces, np.int64).reshape(-1, 3).T
        edges = np.zeros(first[-1] + 1, np.int64)
        np.add.at(edges, starts, 1)
        np.add.at(edges, limits, -1)
        self._wanted = edges.cumsum()[:-1] > 0  # [T]
        self._slots = np.concatenate([[0], self._wanted.cumsum()])  # [T + 1]: rows before each
        self._tokens = np.zeros(len(first) - 1, np.int64)  # [R]: of each text, how many to run
        record = np.searchsorted(first, starts, "right") - 1
        np.maximum.at(self._tokens, record, limits - first[record])

        rows = self._slots[first]  # [R + 1]: rows before each text
        self.num_kept = int(np.searchsorted(rows[1:] * row_bytes, max_bytes, "right"))
        shard = rows[: self.num_kept] * self._file_row // shard_bytes
        changes = np.flatnonzero(np.diff(shard, prepend=-1))  # each shard's first text
        self._shards = [*changes.tolist(), self.num_kept]
        self._bases = rows[self._shards]  # [shards + 1]: rows before each shard
        self.needed_bytes = int(rows[-1]) * row_bytes
        self.cached_bytes = int(rows[self.num_kept]) * row_bytes
        self.folder: Path | None = None
        if folder is not None:
            which = hashlib.sha256(self._wanted.tobytes()).hexdigest()
            whole = {
                **(key or {}),
                "texts": digest_of(texts.records),
                "dtype": str(dtype),
                "plan": [self._shards, forward_tokens, which],
            }
            self.folder = folder / f"hidden-{digest_json(whole)[:16]}"
        self._kept: dict[int, list[Tensor]] = {}  # shards in memory, or mapped

    def missing(self) -> list[int]:
        """Shards that have to be built."""
        shards = range(len(self._shards) - 1)
        return [i for i in shards if i not in self._kept and self._absent(i)]

    def build(
        self, done: Callable[[int, int], None] | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        """Compute the missing shards; processes that share the folder share the work.

        ``done`` is called with the number of finished tokens, prompts included, and the total.

        Raises CacheError: states are not finite in this dtype (the message has the record's line),
        or the disk does not have enough free space for the missing shards.
        """
        missing = self.missing()
        todo = [shard for shard in missing if shard % world == rank]
        tag = f"part-{os.getpid()}"  # of temporary files
        if todo and self.folder is not None:
            rows = sum(self._num_rows(shard) * len(self._absent(shard)) for shard in missing)
            wanted, free = rows * self._file_row, free_bytes(self.folder)
            if wanted > free:
                raise CacheError(
                    f"the hidden states take {wanted / 1e9:.1f} GB, but the disk of {self.folder} "
                    f"has {free / 1e9:.1f} GB free. Limit them with --cache-gb (the rest is "
                    "computed when needed), or set --cache to another disk."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
        texts = {shard: range(*self._shards[shard : shard + 2]) for shard in todo}
        total, ready = sum(int(self._tokens[each].sum()) for each in texts.values()), 0
        for shard in todo:
            states = torch.empty(self._num_rows(shard), self.target.hidden_size, dtype=self.dtype)
            for text, found in self.computed(texts[shard]):
                start = self.texts.first[text]
                stop = start + len(found)
                at, end = self._slots[[start, stop]] - self._bases[shard]
                states[at:end] = found[torch.from_numpy(self._wanted[start:stop])].cpu()
                ready += len(found)
                if done is not None:
                    done(ready, total)
            columns = states.split(self._width, 1)
            if self.folder is None:
                self._kept[shard] = list(columns)
                continue
            for number in self._absent(shard):
                with new_path(self._path(shard, number), tag) as part:
                    columns[number].contiguous().view(torch.uint8).numpy().tofile(part)

    def read(self, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """States of rows [start, stop) of pieces, concatenated.

        Returns fp32 [n, H] on the CPU, or on the target's device if any was computed.
        """
        texts = [self.texts.record_of(start) for start, _ in wanted]
        fresh: dict[int, Tensor] = {}
        device = torch.device("cpu")
        if beyond := sorted({text for text in texts if text >= self.num_kept}):
            fresh = dict(self.computed(beyond))
            device = next(iter(fresh.values())).device
        parts = []
        for text, (start, stop) in zip(texts, wanted, strict=True):
            if text in fresh:
                first = self.texts.first[text]
                parts.append(fresh[text][start - first : stop - first])
            else:
                shard = int(np.searchsorted(self._shards, text, "right")) - 1
                at, end = self._slots[[start, stop]] - self._bases[shard]
                parts.append(torch.cat([c[at:end] for c in self._mapped(shard)], 1).to(device))
        return torch.cat(parts).float()

    def groups(self, pieces: Sequence[Piece]) -> list[int]:
        """A number for each piece: its own if its states are stored, else one per text."""
        numbers: dict[int, int] = {}
        beyond = self.texts.first[self.num_kept]
        keys = (p.start if p.start < beyond else -self.texts.record_of(p.start) for p in pieces)
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def remove(self) -> None:
        """Delete the files."""
        self._kept.clear()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @torch.no_grad()
    def computed(self, texts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """States of texts up to their last row, [tokens, H] each in this dtype, longest first."""
        ends = {text: int(self._tokens[text]) for text in texts}
        waiting = sorted((text for text in texts if ends[text]), key=lambda n: (-ends[n], n))
        while waiting:
            count = max(1, self.forward_tokens // ends[waiting[0]])
            batch, waiting = waiting[:count], waiting[count:]
            ids, mask = pad([self.texts.records[n].token_ids[: ends[n]] for n in batch])
            device = self.target.device
            states = self.target.hidden_states(ids.to(device), mask.to(device)).to(self.dtype)
            for row, text in enumerate(batch):
                found = states[row, : ends[text]]
                if not bool(found.isfinite().all()):
                    where = f"{self._file}, " if self._file else ""
                    raise CacheError(
                        f"{where}line {self.texts.records[text].line}: the target's hidden states "
                        f"are not finite in {self.dtype}. {self._remedy}"
                    )
                yield text, found

    def _num_rows(self, shard: int) -> int:
        return int(self._bases[shard + 1] - self._bases[shard])

    def _path(self, shard: int, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{shard:06d}-{self._names[number]}.bin"

    def _absent(self, shard: int) -> list[int]:
        """The numbers of the shard's missing files."""
        numbers, size = range(len(self._names)), self._num_rows(shard) * self._file_row
        if self.folder is None:
            return list(numbers)
        paths = [self._path(shard, number) for number in numbers]
        return [n for n in numbers if not paths[n].is_file() or paths[n].stat().st_size != size]

    def _mapped(self, shard: int) -> list[Tensor]:
        if shard not in self._kept:
            size = self._num_rows(shard) * self._width
            paths = [str(self._path(shard, number)) for number in range(len(self._names))]
            files = [torch.from_file(path, size=size, dtype=self.dtype) for path in paths]
            self._kept[shard] = [file.view(-1, self._width) for file in files]
        return self._kept[shard]
