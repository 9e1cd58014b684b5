"""vLLM's scheduler with draft trees: its hooks, and the parts that they call.

The number of nodes to verify, and for which requests, is decided here, once for all ranks, when
the drafts of a step have arrived and before the next step is scheduled. Truncated trees are
prefixes, so a request's share is just a number. Whether the heads run is decided one step earlier,
with the number of draft tokens that vLLM's scheduler sends with every step. `async_scheduler` has
the case where vLLM schedules a step ahead.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_medusa.budget.expected_acceptance import USUAL_TAUS, ExpectedAcceptance
from vllm_medusa.budget.policy import AutoBudget, FixedBudget
from vllm_medusa.budget.store import CostStore
from vllm_medusa.integration import compat
from vllm_medusa.integration.drafters.draft_messages import Draft, DraftMessage
from vllm_medusa.integration.metrics import StepReport
from vllm_medusa.integration.requests import request_config
from vllm_medusa.integration.scheduling.clock import PipelinedClock, Step, StepClock
from vllm_medusa.integration.scheduling.cost_key import cost_key
from vllm_medusa.integration.scheduling.grammar_drafts import GrammarDrafts
from vllm_medusa.integration.startup.eagle_options import beam_of, scratch_of
from vllm_medusa.integration.startup.options import TreeSettings, is_eagle, is_for_v2
from vllm_medusa.tree.draft_trees import FROM_LOOKUP
from vllm_medusa.tree.dynamic import DynamicTree

_SAVE_SECONDS, _SAVE_IDLE_SECONDS = 60.0, 10.0  # an engine may end without notice
_SAVE_STEPS = 50  # min new steps to write
_REPORT_STEPS = 8  # plain steps per report
_FULL_STEPS = 32  # window of the fraction of full steps
_FORCED_EVERY = 4  # interval of searches for forced tokens while they do not pay off
_UNUSED_SEARCHES = 16  # searches for copies without a used one after which searches are rare
_SEARCH_EVERY = 8  # interval of rare searches


class TreeScheduler(Scheduler):
    """vLLM's scheduler, with the drafts that are worth their cost."""

    ahead = False  # whether a step is scheduled before the output of the last arrives

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options = TreeSettings.of(self.vllm_config)
        speculative, tree = self.vllm_config.speculative_config, options.tree
        on_v2 = is_for_v2(speculative)
        self.max_drafts = tree.num_draft_tokens  # per request
        self.pending: dict[str, Draft] = {}
        self.clock = PipelinedClock() if self.ahead else StepClock()
        depth = min(options.depth, tree.max_depth)  # without lookup
        # V1 steps support trees of any depth
        run_depth = depth if on_v2 or options.budget is None else self.max_drafts
        self.grammar = GrammarDrafts(
            self.structured_output_manager,
            self.vllm_config.model_config.get_vocab_size(),
            self.max_model_len,
            depth,
            run_depth,
        )
        # forced runs are also drafted in steps without heads
        self.drafts_forced = not on_v2 and not isinstance(options.budget, int | None)
        # KV slots after a request's tokens
        self._scratch = scratch_of(beam_of(tree)) if is_eagle(speculative) else 0
        key = cost_key(self.vllm_config) | {"rows": str(self.max_step_rows())}
        self.costs = CostStore(Path(envs.VLLM_CACHE_ROOT) / "medusa", key, self.max_step_rows())
        self.policy = self.new_policy()
        if self.policy is not None:  # vLLM then requests no drafts by itself
            self.dynamic_sd_lookup = [0] * (1 + self.max_num_running_reqs)
        self._report = StepReport()
        # max nodes that heads drafted after the step of the last output; None: no limit
        self._limit_of_last: int | None = None
        self._full = 0.0  # fraction of recent steps that prefills filled
        self._requests_wait = False  # some requests wait although there are free rows
        self._has_sessions = False  # some request takes more input later
        self._forced_turn = 0
        # on V1, a search in a large batch takes some ms of host time
        self._may_skip_lookup = not on_v2 and options.lookup and isinstance(self.policy, AutoBudget)
        self._unused_searches = 0  # since copies were used
        self._skipped = 0  # steps since the last search

    def new_policy(self) -> AutoBudget | FixedBudget | None:
        """The policy for the number of nodes; None: trees are static, and vLLM truncates them."""
        options = self.options
        if isinstance(options.budget, int | None):
            compat.logger.warning(
                "Each request gets %d draft nodes, up to %d rows per step, at any load: with large "
                "batches this can be far slower than without drafts. Without a static tree, "
                '"budget": "auto" adapts the number.',
                self.max_drafts,
                self.max_step_rows(),
            )
            return None if options.budget is None else FixedBudget(self.max_drafts)
        cost, problem = self.costs.load()
        if problem:
            compat.logger.info("Measuring step costs again: %s", problem)
        acceptance = ExpectedAcceptance(options.taus or USUAL_TAUS)
        assert isinstance(options.tree, DynamicTree)
        top_limit = options.tree.top_limit
        return AutoBudget(cost, acceptance, self.max_drafts, top_limit, even=self.ahead)

    def add_request(self, request: Request) -> None:
        """Add a request, or more input for one; its accepted drafts are counted by depth."""
        self._has_sessions |= request.resumable
        super().add_request(request)
        own = request_config(request.sampling_params, self.options.acceptance).max_draft_tokens
        added: Any = self.requests.get(request.request_id, request)
        added.max_draft_tokens = own  # None: no limit
        if request.spec_decode_metrics is not None:
            runs = self.grammar.run_depth if request.use_structured_output else 0
            depth = max(self.options.depth, runs)
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(depth)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; topologies that workers can't know are sent to them."""
        self._learn_time(self.clock.begin())
        if self._has_sessions:  # more input follows the accepted tokens, with or without stop token
            for request in self.running:
                if request.resumable:
                    request.spec_token_ids = []
        started = time.perf_counter()
        output: Any = super().schedule(*args, **kwargs)
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        rows, nodes = output.total_num_scheduled_tokens, sum(map(len, drafts.values()))
        prefill = rows > len(scheduled) + nodes
        full = prefill and not nodes and rows >= self.max_num_scheduled_tokens
        self._full += (full - self._full) / _FULL_STEPS
        self._requests_wait = bool(self.waiting) and rows < self.max_num_scheduled_tokens
        if self.policy is not None and not self.ahead:
            output.num_spec_tokens_to_schedule = self._limit(len(scheduled)) if scheduled else 0
        limit = output.num_spec_tokens_to_schedule
        if self._may_skip_lookup:
            rarely = limit < 1 and self._unused_searches >= _UNUSED_SEARCHES
            self._skipped = (self._skipped + 1) % _SEARCH_EVERY if rarely else 0
            output.skips_lookup = self._skipped > 0
        self.clock.start(Step(started, rows, len(scheduled), limit, prefill, nodes))
        trees = {
            req_id: draft.parents[: len(tokens)]
            for req_id, tokens in drafts.items()
            if (draft := self._draft_of(req_id)) is not None
            and draft.parents is not None
            and draft.token_ids[: len(tokens)] == tokens  # otherwise vLLM's placeholders
        }
        if trees:
            output.tree_parents = trees
        return output  # type: ignore[no-any-return]

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Reduce the received drafts to those that the next step verifies."""
        assert isinstance(draft_token_ids, DraftMessage)
        if not any(draft_token_ids.draft_token_ids) and not self._needs_no_heads(draft_token_ids):
            for request in map(self.requests.get, draft_token_ids.req_ids):
                if request is not None and request.spec_token_ids:
                    request.spec_token_ids = []
            self._report.chosen = 0
            if self._skipped:
                return
            self._unused_searches += 1
            if isinstance(self.policy, AutoBudget) and self._looks_for_copies:
                self.policy.acceptance.no_copies(len(draft_token_ids.req_ids))
            return
        drafts = self._received(draft_token_ids)
        counts = [len(draft.token_ids) for draft in drafts.values()]
        if any(counts) and self.policy is not None:
            room, prefill = self._room()
            counts = self.policy.counts(
                [*drafts.values()], len(self.running), room, prefill=prefill
            )
        self._report.chosen = sum(counts)
        self._unused_searches = 0 if any(counts) else self._unused_searches + 1
        for draft, count in zip(drafts.values(), counts, strict=True):
            draft.request.spec_token_ids = draft.token_ids[:count]
        self.pending |= drafts
        if len(self.pending) > len(self.requests):
            self.pending = {
                name: draft for name, draft in self.pending.items() if self._draft_of(name)
            }

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Record the drafts that a step scheduled ahead verifies; masks encode which are valid."""
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)
        assert isinstance(draft_token_ids, DraftMessage)
        scheduled, parents = scheduler_output.scheduled_spec_decode_tokens, {}
        for req_id, candidates in draft_token_ids.candidates.items():
            request, count = self.requests.get(req_id), len(scheduled.get(req_id, ()))
            if not count or request is None or not request.use_structured_output:
                continue
            draft, scheduled[req_id] = self.grammar.scheduled(request, candidates, count)
            parents[req_id] = draft.parents
            scheduler_output.num_invalid_spec_tokens[req_id] = count - len(draft.token_ids)
            self.pending[req_id] = draft
        extended: Any = scheduler_output
        extended.tree_parents = parents

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Each node's mask is the grammar's state after its own path."""
        if not scheduler_output.has_structured_output_requests:
            return super().get_grammar_bitmask(scheduler_output)
        return self.grammar.bitmask(scheduler_output, self.pending, super().get_grammar_bitmask)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Update the estimates from a step; the rest is vLLM's."""
        step = self.clock.output()
        if step.requests:  # vLLM collects its statistics in the call below
            drafted = step.limit > 0 and self.options.tree.max_depth > 0
            self._report.add(step.requests, step.nodes, prefill=step.prefill, drafted=drafted)
            step.tokens = sum(map(len, model_runner_output.sampled_token_ids))
        self._learn_drafts(scheduler_output, model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self.spec_decode_metrics_level != "none":
            self._add_acceptance(result)
        if step.requests:
            self._limit_of_last = step.limit if step.limit < self.max_drafts else None
            more = bool(self.running) or self.has_unfinished_requests()
            self._learn_time(self.clock.end(step, more=more))
            self.save_costs(_SAVE_SECONDS if more else _SAVE_IDLE_SECONDS)
        return result

    def _add_acceptance(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add a request's acceptance so far if it may end at a stop string.

        The front end finds these; vLLM adds the acceptance only where its scheduler ends a request.
        """
        for output in itertools.chain.from_iterable(each.outputs for each in outputs.values()):
            request = self.requests.get(output.request_id)
            if request is not None and request.sampling_params.stop:
                output.spec_decode_metrics = copy.deepcopy(request.spec_decode_metrics)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Add step statistics to vLLM's, for the front end's metrics."""
        if self.log_stats and self.policy is not None and not self._report_can_wait():
            spec_decoding_stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
            if isinstance(self.policy, AutoBudget):
                self._report.ratio = round(1e3 * self.policy.expected_ratio)
            self._report.put_into(spec_decoding_stats)
            self._report = StepReport()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _report_can_wait(self) -> bool:
        """Whether the report has only a few plain steps, and another step follows."""
        report = self._report
        other = report.tree or report.prefill or report.heads or report.chosen
        return not other and 0 < report.plain < _REPORT_STEPS and bool(self.running)

    def shutdown(self) -> None:
        """Store step costs; the rest is vLLM's."""
        self.save_costs(0.0)
        super().shutdown()

    def save_costs(self, min_seconds: float) -> None:
        """Write step costs, if the last write was at least ``min_seconds`` ago."""
        if isinstance(self.policy, AutoBudget):
            problem = self.costs.save(self.policy.cost, _SAVE_STEPS, min_seconds)
            if problem:
                compat.logger.warning_once("Step costs can't be stored: %s", problem)

    def max_step_rows(self) -> int:
        """Max rows of a decoding step."""
        maximum = self.scheduler_config.max_num_seqs * (1 + self.max_drafts)
        return min(self.max_num_scheduled_tokens, maximum)

    def _limit(self, requests: int) -> int:
        """Max nodes to draft per request, for that many requests."""
        assert self.policy is not None
        allowed = self._max_allowed()
        if not allowed:
            return 0
        room = self.max_num_scheduled_tokens - requests
        if self.options.max_rows is not None:
            room = min(room, self.options.max_rows - requests)
        return min(self.policy.limit(requests, room, self._full), allowed)

    def _max_allowed(self) -> int:
        """Max draft nodes that any running request allows; 0 near the end of the context."""
        most = 0
        for request in self.running:
            if request.num_tokens + self._scratch <= self.max_model_len:
                own = max_draft_tokens(request)
                if own is None:
                    return self.max_drafts
                most = max(most, own)
        return most

    def _draft_of(self, req_id: str) -> Draft | None:
        """The pending draft of a request; its id may have been reused."""
        draft = self.pending.get(req_id)
        if draft is None or draft.request is not self.requests.get(req_id):
            return None
        return draft

    @property
    def _looks_for_copies(self) -> bool:
        """Whether the absence of copied drafts is informative."""
        return isinstance(self.policy, AutoBudget) and (
            self.options.lookup or self.policy.acceptance.copies
        )

    def _needs_no_heads(self, message: DraftMessage) -> bool:
        """Whether there can be drafts although no head ran."""
        if message.candidates:
            return True
        return self.drafts_forced and any(r.use_structured_output for r in self.running)

    def _received(self, message: DraftMessage) -> dict[str, Draft]:
        """The received drafts, of requests that can use them, filtered by grammar."""
        survival: Iterable[list[float]] = message.survival or itertools.repeat([])
        copies = self._looks_for_copies
        found: dict[str, Draft] = {}
        forced_for = self._forced_for(message)
        for req_id, tokens, values in zip(
            message.req_ids, message.draft_token_ids, survival, strict=False
        ):
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            own = max_draft_tokens(request)
            if request.is_prefill_chunk or own == 0:
                request.spec_token_ids = []
                continue
            if req_id in message.candidates:
                draft: Draft | None
                draft = self.grammar.chosen(request, message.candidates[req_id], self.max_drafts)
            elif request.use_structured_output and self.drafts_forced:
                draft = self.grammar.forced(request) if req_id in forced_for else None
                if draft is None:
                    request.spec_token_ids = []
                    continue  # possible drafts are unknown
            else:
                draft = Draft(values, request=request, token_ids=tokens)
                unknown = [0] * len(values) if copies else None
                draft.copied = message.proposed_by.get(req_id, unknown)
            draft.limit = self._limit_of_last
            if own is not None:
                draft.keep(own)
            found[req_id] = draft
        return found

    def _forced_for(self, message: DraftMessage) -> Iterable[str]:
        """Requests to search for forced tokens: if no head ran, and they are likely to pay off.

        Otherwise one request is searched occasionally, to update the estimate.
        """
        if not self.drafts_forced or message.candidates:
            return ()
        followers = [
            name
            for name in message.req_ids
            if (request := self.requests.get(name)) is not None and request.use_structured_output
        ]
        if not followers or not self._room()[0]:
            return ()
        assert isinstance(self.policy, AutoBudget)
        if self.policy.forced_pay:
            return set(followers)
        self._forced_turn += 1
        turn, rest = divmod(self._forced_turn, _FORCED_EVERY)
        return () if rest else (followers[turn % len(followers)],)

    def _room(self) -> tuple[int, bool]:
        """Rows of the next step that are left for drafts, and whether it includes a prefill."""
        admits = len(self.running) < self.max_num_running_reqs and not self._requests_wait
        left, has_prefill = self.max_num_scheduled_tokens, False
        for request in itertools.chain(self.running, self.waiting if admits else ()):
            rows = max(1, request.num_tokens - request.num_computed_tokens)
            has_prefill |= rows > 1
            left -= rows
            if left <= 0:
                return 0, has_prefill
        if self.options.max_rows is not None:
            left = min(left, self.options.max_rows - len(self.running))
        return max(0, min(left, self._free_slots())), has_prefill

    def _free_slots(self) -> int:
        """KV slots available for drafts without preempting a running request.

        Each request may need one block for itself and one more for the partial block of its drafts.
        Slots that vLLM reserves after them (an EAGLE drafter's scratch) are allocated at prefill.
        """
        groups = len(self.kv_cache_config.kv_cache_groups)
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks() // groups
        return max(0, blocks - 2 * len(self.running)) * self.block_size

    def _learn_time(self, ended: tuple[Step, float] | None) -> None:
        if ended is None or not isinstance(self.policy, AutoBudget):
            return
        step, ms = ended
        if step.prefill:
            prompt = step.rows - step.requests - step.nodes
            self.policy.observe_prefill(prompt, step.nodes, step.requests, step.limit, ms)
            return
        expected = self.policy.observe(step.rows, step.requests, step.limit, ms, step.tokens)
        if expected is not None:
            self._report.time(ms, expected)

    def _learn_drafts(self, scheduler_output: SchedulerOutput, output: Any) -> None:
        """Compare the accepted drafts with the expected acceptance of all drafts.

        Requests without verified drafts count too; otherwise only likely drafts would be observed.
        """
        if not self.pending:
            return
        verified = scheduler_output.scheduled_spec_decode_tokens
        seen: list[Any] = []
        for req_id in scheduler_output.num_scheduled_tokens:
            draft = self._draft_of(req_id)
            self.pending.pop(req_id, None)
            index = output.req_id_to_index.get(req_id)
            if draft is None or index is None or not output.sampled_token_ids[index]:
                continue
            sampled = output.sampled_token_ids[index]
            if draft.run:
                self.grammar.learn(draft, sampled)
            nodes, accepted = len(verified.get(req_id, ())), len(sampled) - 1
            if draft.copied and any(draft.copied):
                path = _accepted_copies(draft, nodes, sampled[:-1])
                self._report.copied += path.count(FROM_LOOKUP)
                accepted -= 0 if self.ahead else len(path)
            if self.ahead:  # only ranks are known
                draft.copied = None
            if len(draft.survival) or draft.copied is not None:
                seen.append((draft, nodes, accepted))
        if seen and isinstance(self.policy, AutoBudget):
            self.policy.observe_drafts(*zip(*seen, strict=True))


def _accepted_copies(draft: Draft, nodes: int, accepted: list[int]) -> list[int]:
    """Origins of the accepted tokens of the chain that needs no heads."""
    proposed = zip(draft.token_ids[:nodes], draft.copied or (), strict=False)
    chain = [(token, source) for token, source in proposed if source]
    pairs = zip(chain, accepted, strict=False)
    path = itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs)
    return [source for (_, source), _ in path]


def max_draft_tokens(request: Request) -> int | None:
    """The request's own limit of draft nodes per step; None: no limit."""
    return getattr(request, "max_draft_tokens", None)
