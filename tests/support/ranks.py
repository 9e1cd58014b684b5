"""Workers that record their rank's decisions, so that a test can compare the ranks.

Their collectives run on gloo, not on vLLM's shared memory, which waits actively for other ranks.
Used as ``worker_cls``. Tests call it with ``LLM.collective_rpc``, which every executor has;
arguments and results are lists of plain numbers, which every transport supports. Differences
between vLLM's two model runners are in `recording_v1` and `recording_v2`.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

from support.after_drafting import Drafted, after_drafting
from support.planted import plant
from support.runner import sized
from support.uncompiled import use_uncompiled

WORKER = f"support.recording_{sized('v1', 'v2')}.RecordingWorker"
MISS = 0.1  # probability of a wrong planted token, so that walks also stop at inner nodes


class Decision(NamedTuple):
    """The decision of one rank for one request in one step."""

    request: int  # see `request_key`
    position: int  # output tokens after the step
    num_nodes: int  # of the tree, root included; 1: a plain step
    nodes: tuple[int, ...]  # the accepted path, root first
    output: tuple[int, ...]  # accepted tokens and the one after them
    drafts: tuple[int, ...]  # the next drafts of the heads, before planting


def request_key(prompt: Sequence[int], seed: int | None) -> int:
    """An id for a request that is equal in every process and engine."""
    return zlib.crc32(repr((list(prompt), seed)).encode())


def decisions(rows: Sequence[Sequence[Any]]) -> list[Decision]:
    return [Decision(*(tuple(x) if isinstance(x, list) else x for x in row)) for row in rows]


class Recording:
    """Worker mixin with methods and records for tests."""

    def init_device(self) -> None:
        """Start recording; it ends at shutdown."""
        use_uncompiled()
        # ranks whose groups differ use gloo
        _CPUSHMDistributed.make_group_name = staticmethod(lambda group: str(os.getpid()))
        super().init_device()
        self._decisions: list[list[Any]] = []
        self._known: dict[int, list[int]] = {}
        self._watching = ExitStack()
        self._watching.enter_context(after_drafting(self._look))

    def shutdown(self) -> None:
        """Stop recording: other engines may follow in this process."""
        self._watching.close()
        super().shutdown()

    @property
    def drafter(self) -> Any:
        raise NotImplementedError

    def process_id(self) -> int:
        return os.getpid()

    def imported_before_fork(self) -> bool:
        """Whether the fork server imported `rank_imports`, whose errors it ignores."""
        return "support.rank_imports" in sys.modules

    def shard(self) -> list[int] | None:
        """(first id, number of ids) scored by this rank; None: the whole vocabulary."""
        shard = self.drafter._shard
        return None if shard is None else [shard.first_id, shard.num_ids]

    def plant(self, known: list[tuple[int, list[int]]]) -> None:
        """From now on, draft the known future tokens of these requests on a random leaf path.

        Requests that are unknown but limited to some tokens get random ones of these.
        """
        self._known = {key: list(tokens) for key, tokens in known}

    def take_decisions(self) -> list[list[Any]]:
        """The decisions since the last call; see `decisions`."""
        taken, self._decisions = self._decisions, []
        return taken

    def _look(self, r: Drafted) -> list[int] | None:
        key, position = request_key(r.prompt, r.params.seed), len(r.output)
        self._decisions.append([key, position, r.num_nodes, r.path, r.new, r.drafts])
        if r.tree is None or (key not in self._known and not r.params.allowed_token_ids):
            return None
        tokens = r.params.allowed_token_ids or range(self.model_config.get_vocab_size())
        rng = random.Random(1_000_003 * key + position)
        return plant(r.tree, self._known.get(key, [])[position:], tokens, rng, MISS)[0]
