"""Trees from an EAGLE drafter, over its own KV cache: the same for both of vLLM's runners.

A drafter's layer sees features of the target, shifted by one: its entry at position p is made of
the target's hidden states there and of the token at p + 1. So the entries of all accepted tokens
can be exact, and are: after each verification the accepted path goes through the drafter with the
target's own hidden states, into the path's slots. Branches are scratch behind them. A branch's
hidden states are the drafter's own guesses; the next prefill writes over what they left. Tokens of
steps that do not draft wait and go through it together (`Waiting`).

    slots    | exact, up to the token before x ............ | scratch: level 1 | level 2 | ...
    tokens     t1 t2 ... x (drawn last)                       k nodes            k nodes

Only shapes and bounds are known to the host. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_medusa.proposer.build import build_tree, clean
from vllm_medusa.proposer.candidates import Choices, Proposal
from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.tree.dynamic import Beam
from vllm_medusa.worker.eagle import check_vocabulary

NO_SLOT = -1  # of what is not to be kept
_MOST_WAITING = 128  # rows: the step that takes them in is longer by them
_LONGEST_WAIT = 32  # steps


@dataclass(frozen=True)
class AcceptedPaths:
    """The tokens that the latest step made sure of, T rows of B requests in turn.

    Where it is the device that knows how many they are, each request's rows go on to as many as
    there can be; those behind ``last`` have no slot, and no other row sees them.
    """

    starts: Tensor  # int32 [B + 1], first row of each request
    starts_cpu: Tensor  # the same on the host
    most_rows: int  # of a request
    last: Tensor  # int64 [B], the row of each request's last token
    next_ids: Tensor  # integer [T], the token after each
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], or `NO_SLOT`
    features: Tensor  # [T, features], the target's hidden states
    lengths: Tensor  # integer [B], the position after each request's last row
    longest: int  # bound of them
    block_table: Tensor  # int32 [B, blocks]
    ends: Tensor  # int64 [B], the position after each request's last token


@dataclass(frozen=True)
class Roots:
    """Where B requests' trees begin: the drafter's states at their last exact entries."""

    normed: Tensor  # [B, H], what its LM head takes
    hidden: Tensor  # [B, H], what its next step takes
    ends: Tensor  # int64 [B], exact entries
    longest: int  # bound of them
    block_table: Tensor  # int32 [B, blocks]
    used: Tensor | None = None  # bool [B], whose trees are kept; None: all

    def __getitem__(self, requests: list[int]) -> Roots:
        """Those of some requests."""
        index = torch.tensor(requests)
        normed, hidden, ends = (part[index] for part in (self.normed, self.hidden, self.ends))
        return Roots(normed, hidden, ends, self.longest, self.block_table[index])

    def only(self, used: Tensor) -> Roots:
        """The same, but others than ``used`` (bool [B]) are given no slots and no context.

        There may be no room behind them.
        """
        ends = torch.where(used, self.ends, 0)
        return Roots(self.normed, self.hidden, ends, self.longest, self.block_table, used)


class EagleTrees:
    """Mixed into what has a drafter's module and its attention groups."""

    vllm_config: Any
    model: Any  # vLLM's module
    method: str
    beam: Beam
    block_size: int  # of its KV cache group
    target_ids: Tensor | None = None  # int64 [V_draft]; None: the vocabularies are one

    @property
    def groups(self) -> Sequence[Any]:
        """Attention groups of vLLM with its layers; none before there is a KV cache."""
        raise NotImplementedError

    def read_vocabulary(self) -> None:
        """Take in which of the target's tokens a loaded drafter knows.

        Raises:
            MedusaConfigError: They can't be the target's.

        """
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        if offsets is not None:
            ids = torch.arange(len(offsets), device=offsets.device) + offsets
            check_vocabulary(ids, self.vllm_config.model_config.get_vocab_size())
            self.target_ids = ids

    @torch.inference_mode()
    def prefill(self, paths: AcceptedPaths) -> Roots:
        """Make the entries of the accepted tokens, exactly."""
        features = paths.features
        if self.method == "eagle3":
            features = self.model.combine_hidden_states(features)
        common = CommonAttentionMetadata(
            query_start_loc=paths.starts,
            query_start_loc_cpu=paths.starts_cpu,
            seq_lens=paths.lengths.to(torch.int32),
            num_reqs=len(paths.ends),
            num_actual_tokens=len(paths.positions),
            max_query_len=paths.most_rows,
            max_seq_len=paths.longest,
            block_table_tensor=paths.block_table,
            slot_mapping=paths.slots,
        )
        normed, hidden = self._forward(common, paths.next_ids, paths.positions, features)
        last = paths.last
        return Roots(normed[last], hidden[last], paths.ends, paths.longest, paths.block_table)

    @torch.inference_mode()
    def grow(
        self,
        roots: Roots,
        root: Tensor,
        num_nodes: int,
        max_depth: Tensor,
        limit: int | None = None,
    ) -> Proposal:
        """Draft a tree for each request.

        Args:
            roots: of B requests.
            root: int64 [B], the tokens that the target gave last.
            num_nodes: Nodes of each tree, root included.
            max_depth: int64 [B], the deepest node that each request has a use for. Behind the
                exact entries of those with any there is room for all that is expanded.
            limit: Drafts of a request that are of use, from 1; the best so many lie no deeper, so
                as many levels are expanded at most. None: all.

        """
        branches = _Branches(self, roots.only(max_depth > 0))
        return build_tree(branches, self.beam, root, num_nodes, max_depth, limit)

    def choices(self, normed: Tensor, width: int) -> Choices:
        """The best tokens after states [B, k, H]."""
        rows = normed.flatten(0, 1)
        logits = self.model.logits_processor(self.model.lm_head, rows).float()
        logits = logits.unflatten(0, normed.shape[:2])  # [B, k, V_draft]
        ids = stable_topk(logits, width)
        log_confidence = clean(logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True))
        return Choices(ids if self.target_ids is None else self.target_ids[ids], log_confidence)

    def step(
        self,
        roots: Roots,
        level: int,
        token_ids: Tensor,  # int64 [B, k]
        hidden: Tensor,  # [B, k, H], of the nodes' parents
        seen: Tensor,  # bool [B, k, S], scratch that each node sees, the k the last of it
    ) -> tuple[Tensor, Tensor]:
        """Run one level of nodes: normed and hidden states, [B, k, H]."""
        (batch, width), size = token_ids.shape, seen.shape[2]
        device = token_ids.device
        nodes = torch.arange(size - width, size, device=device)
        requests = torch.arange(batch, device=device)[:, None]
        slots = self.slots(roots.block_table, requests, roots.ends[:, None] + nodes)
        if roots.used is not None:
            slots = torch.where(roots.used[:, None], slots, NO_SLOT)
        starts = 0, (batch + 1) * width, width
        common = CommonAttentionMetadata(
            query_start_loc=torch.arange(*starts, dtype=torch.int32, device=device),
            query_start_loc_cpu=torch.arange(*starts, dtype=torch.int32),
            seq_lens=(roots.ends + size).to(torch.int32),
            num_reqs=batch,
            num_actual_tokens=batch * width,
            max_query_len=width,
            max_seq_len=roots.longest + size,
            block_table_tensor=roots.block_table,
            slot_mapping=slots.flatten(),
        )
        positions = (roots.ends - 1 + level).repeat_interleave(width)
        branches = None if width == 1 else (seen, roots.ends)  # a chain sees all of it
        states = self._forward(
            common, token_ids.flatten(), positions, hidden.flatten(0, 1), branches
        )
        normed, hidden = (state.unflatten(0, (batch, width)) for state in states)
        return normed, hidden

    def _forward(
        self,
        common: CommonAttentionMetadata,
        token_ids: Tensor,  # [T]
        positions: Tensor,  # int64 [T]
        hidden: Tensor,  # [T, H]
        branches: tuple[Tensor, Tensor] | None = None,  # what nodes see; None: a chain
    ) -> tuple[Tensor, Tensor]:
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for group in self.groups:
            builder = group.get_metadata_builder()
            if branches is None:
                built = builder.build(0, common)
            else:
                built = builder.build_branches(common, *branches)
            metadata |= dict.fromkeys(group.layer_names, built)
            slots |= dict.fromkeys(group.layer_names, common.slot_mapping)
        with set_forward_context(
            metadata or None,  # vLLM's memory profiling has no cache
            self.vllm_config,
            num_tokens=common.num_actual_tokens,
            slot_mapping=slots or None,
        ):
            normed, hidden = self.model(
                input_ids=token_ids.to(torch.int32),
                positions=positions,
                hidden_states=hidden,
                inputs_embeds=None,
            )
        return normed, hidden

    def slots(self, block_table: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
        """Cache slots, int64, of positions of requests: integers that go together."""
        blocks = torch.div(positions, self.block_size, rounding_mode="floor")
        offsets = positions - blocks * self.block_size
        return block_table[requests, blocks].to(torch.int64) * self.block_size + offsets


class Waiting:
    """Tokens of plain steps, which the drafter takes in many at a time, as it does prompts.

    Plain steps give each request one token. The drafter needs its entries when it drafts next, and
    once other requests run, who may have them in their prefix, or have their slots. That step's own
    entries come later.
    """

    def __init__(self, drafter: EagleTrees) -> None:
        self._drafter = drafter
        self._requests: list[str] = []
        self._steps: list[AcceptedPaths] = []

    def roots(
        self, requests: Sequence[str], paths: AcceptedPaths, *, plain: bool, drafts: bool
    ) -> Roots | None:
        """Take in a step's tokens, at once or with those to come.

        Args:
            requests: the B requests of the step.
            paths: theirs.
            plain: whether each has one row.
            drafts: whether the roots are asked for.

        """
        if not plain or self._requests != requests:
            self.take_in()
        if not plain:
            return self._drafter.prefill(paths)
        self._requests = list(requests)
        table = paths.block_table if drafts else paths.block_table.clone()  # the runner's own
        self._steps.append(replace(paths, block_table=table))
        depth = len(self._steps)
        enough = depth >= _LONGEST_WAIT or depth * len(requests) >= _MOST_WAITING
        return self.take_in() if drafts or enough else None

    def take_in(self) -> Roots | None:
        """Make the entries of all that waits; the roots behind it, if anything did."""
        steps, self._steps = self._steps, []
        if len(steps) <= 1:
            return self._drafter.prefill(steps[0]) if steps else None
        last, depth = steps[-1], len(steps)

        def in_turn(name: str) -> Tensor:  # request by request
            return torch.stack([getattr(step, name) for step in steps], 1).flatten(0, 1)

        starts = last.starts * depth
        paths = replace(
            last,
            starts=starts,
            starts_cpu=last.starts_cpu * depth,
            most_rows=depth,
            last=starts[1:].to(torch.int64) - 1,
            next_ids=in_turn("next_ids"),
            positions=in_turn("positions"),
            slots=in_turn("slots"),
            features=in_turn("features"),
        )
        return self._drafter.prefill(paths)


class _Branches:
    """The drafter at one step of B requests, as the builder of trees asks it."""

    def __init__(self, drafter: EagleTrees, roots: Roots) -> None:
        self.drafter, self.roots = drafter, roots
        self.hidden = roots.hidden.unsqueeze(1)  # [B, k, H] of the latest level
        self.seen = roots.ends.new_zeros((len(roots.ends), 1, 0), dtype=torch.bool)  # [B, k, S]

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """The choices below nodes, see `Branching`; the roots' own are exact already."""
        if level == 0:
            return self.drafter.choices(self.roots.normed.unsqueeze(1), width)
        own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        own = own.expand(len(tokens), -1, -1)
        self.seen = torch.cat([_of_parents(self.seen, parents), own], 2)
        hidden = _of_parents(self.hidden, parents)
        normed, self.hidden = self.drafter.step(self.roots, level, tokens, hidden, self.seen)
        return self.drafter.choices(normed, width)


def _of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """[B, k, n] of the level above, by int64 [B, k'] -> [B, k', n]."""
    return values.gather(1, parents.unsqueeze(-1).expand(-1, -1, values.shape[2]))
