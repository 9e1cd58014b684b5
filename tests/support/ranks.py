"""A worker that remembers what its rank decided, so that a test can compare the ranks.

Named as ``worker_cls``. A test talks to it with ``LLM.collective_rpc``, which every executor has;
arguments and results are lists of plain numbers, which every transport carries.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_medusa.tree import TokenTree
from vllm_medusa.worker.v1.worker import MedusaCPUWorker

WORKER = f"{__name__}.RecordingWorker"
MISS = 0.1  # a planted token is wrong this often, so that walks also stop at inner nodes


class Decision(NamedTuple):
    """What one rank made of one request in one step."""

    request: int  # see `request_key`
    position: int  # output tokens after the step
    num_nodes: int  # of the tree, root included; 1: a plain step
    nodes: tuple[int, ...]  # the accepted path, root first
    output: tuple[int, ...]  # accepted tokens and the one after them
    drafts: tuple[int, ...]  # what the heads propose next, before anything is planted


def request_key(prompt: Sequence[int], seed: int | None) -> int:
    """Tells requests apart, alike in every process and engine."""
    return zlib.crc32(repr((list(prompt), seed)).encode())


def decisions(rows: Sequence[Sequence[Any]]) -> list[Decision]:
    """What `RecordingWorker.take_decisions` returned, as `Decision`."""
    return [Decision(*(tuple(x) if isinstance(x, list) else x for x in row)) for row in rows]


class RecordingWorker(MedusaCPUWorker):
    """Records every decision; drafts, dice or logits can be interfered with."""

    def init_device(self) -> None:
        """Hook the one runner this worker has."""
        super().init_device()
        self._decisions: list[list[Any]] = []
        self._known: dict[int, list[int]] = {}
        self._verifier = self.model_runner._verifier
        self._propose = self.model_runner.propose_draft_token_ids
        self.model_runner.propose_draft_token_ids = self._record

    def process_id(self) -> int:
        """The operating system's number of this rank's process."""
        return os.getpid()

    def shard(self) -> list[int] | None:
        """(first id, number of ids) this rank ranks; None: the whole vocabulary."""
        shard = self.model_runner.drafter._shard
        return None if shard is None else [shard.first_id, shard.num_ids]

    def plant(self, known: list[tuple[int, list[int]]]) -> None:
        """From now on draft for these requests what is known to come, on a random leaf's path.

        A request that is not known but limited to some tokens gets random ones of them.
        """
        self._known = {key: list(tokens) for key, tokens in known}

    def take_decisions(self) -> list[list[Any]]:
        """The decisions since the last call; see `decisions`."""
        taken, self._decisions = self._decisions, []
        return taken

    def disturb(self, kind: str) -> None:
        """Make this rank differ from rank 0, which is left alone."""
        if kind == "shared_dice":
            torch.manual_seed(self.rank)
        else:
            change = {"dice": _other_dice, "logits": _other_logits}[kind]
            self.model_runner._verifier = change(self._verifier, self.rank)

    def restore(self) -> None:
        """Undo `disturb`."""
        self.model_runner._verifier = self._verifier
        torch.manual_seed(0)

    def _record(self, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        step, path = runner._step, runner._verdict.path
        drafts = self._propose(scheduler_output, sampled, *args, **kwargs)
        for index, req_id in enumerate(runner.input_batch.req_ids):
            if not sampled[index]:
                continue
            request = runner.requests[req_id]
            params = request.sampling_params
            key = request_key(request.prompt_token_ids, params.seed)
            position = len(request.output_token_ids)
            nodes = path.nodes[index, : int(path.num_accepted[index]) + 1].tolist()
            self._decisions.append(
                [
                    key,
                    position,
                    int(step.num_nodes[index]),
                    nodes,
                    list(sampled[index]),
                    list(drafts[index]),
                ]
            )
            if key in self._known or params.allowed_token_ids:
                tokens = params.allowed_token_ids or range(self.model_config.get_vocab_size())
                future = self._known.get(key, [])[position:]
                rng = random.Random(1_000_003 * key + position)
                planted = _plant(runner.drafter.options.tree, future, tokens, rng)
                drafts[index] = planted[: len(drafts[index])]
        return drafts


def _plant(
    tree: TokenTree, future: Sequence[int], tokens: Sequence[int], rng: random.Random
) -> list[int]:
    drafts = [rng.choice(tokens) for _ in range(tree.num_nodes)]
    for node, token in zip(rng.choice(tree.retrieval)[1:], future, strict=False):
        if rng.random() >= MISS:
            drafts[node] = token
    return drafts[1:]


def _other_dice(verifier: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Every request's generator starts elsewhere on every rank."""
    met: dict[int, torch.Generator] = {}  # by id; kept alive, so that ids stay their own

    def verify(logits: Any, step: Any, metadata: Any, *rest: Any) -> Any:
        for generator in metadata.generators.values():
            if id(generator) not in met:
                met[id(generator)] = generator
                generator.manual_seed(generator.initial_seed() + rank)
        return verifier(logits, step, metadata, *rest)

    return verify


def _other_logits(verifier: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Every rank but the first sees noise on the logits, a tenth of their spread."""

    def verify(logits: Any, *rest: Any) -> Any:
        noise = rank * 0.1 * logits.std() * torch.randn_like(logits)
        return verifier(logits + noise, *rest)

    return verify
