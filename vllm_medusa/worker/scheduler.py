"""vLLM's scheduler with a budget of draft nodes: how many a step verifies, and for whom.

The decision is made here, once for all ranks, when the drafts of a step have come in and before
the next step is scheduled: the requests' survivals say what their nodes are worth, the measured
cost of steps what they take. Cuts of a tree are prefixes, so a share is a count.

Whether the heads run at all is said one step earlier, by the number of draft tokens that vLLM's
scheduler passes on with every step (`dynamic_sd_lookup`, made for counts that depend on the batch
size; any object that can be indexed will do).
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_medusa.budget.choose import NodeBudget
from vllm_medusa.budget.cost import Floats, StepCost
from vllm_medusa.budget.outlook import Outlook
from vllm_medusa.budget.store import cost_path, load_cost, save_cost
from vllm_medusa.plugin import installed_vllm
from vllm_medusa.tree.drafts import FROM_LOOKUP
from vllm_medusa.tree.dynamic import Beam
from vllm_medusa.worker import compat
from vllm_medusa.worker.compat import uses_v2_runner
from vllm_medusa.worker.grammar_scheduler import GrammarAsyncScheduler, GrammarScheduler
from vllm_medusa.worker.options import EngineOptions, absolute
from vllm_medusa.worker.report import StepReport
from vllm_medusa.worker.requests import GREEDY_BELOW, follows_grammar

_KEEP_EVERY = 60.0  # seconds, while it serves
_KEEP_IDLE = 10.0  # seconds, when there is nothing to do: nobody says when an engine ends
_WORTH_KEEPING = 50  # steps
_LOG_EVERY = 1e4  # ms of decoding
_PREFILL_STEPS = 32  # of which share has a prefill
_TURNS = 4  # steps from one request whose forced run is looked at to the next
_TOGETHER = 4  # requests' steps whose acceptance is learned at once, since thinking takes time


def worth_of(log_survival: npt.NDArray[np.float32]) -> list[list[float]]:
    """The survivals of each request's drafts, [B, K], that can survive at all; they come first."""
    return [np.exp(row[np.isfinite(row)]).tolist() for row in log_survival]


@dataclass
class Step:
    """A step in flight."""

    started: float  # seconds
    rows: int
    requests: int
    limit: int  # nodes that are drafted for a request at most, at its end; 0: no head runs
    prefill: bool  # it does more than decode
    nodes: dict[str, int]  # request -> drafts verified


class _Fate(NamedTuple):
    """What became of a request's drafts."""

    survival: Sequence[float]  # of all that was drafted
    kind: int
    verified: int
    accepted: int
    of_copies: int  # how many of these were copied
    proposed_by: list[int] | None


@dataclass
class _Seen:
    """What the log says of the decoding steps since the last time."""

    steps: int = 0
    requests: int = 0
    nodes: int = 0
    ms: float = 0.0
    predicted: float = 0.0  # ms
    accepted: int = 0

    def add(self, step: Step, ms: float, predicted: float) -> None:
        self.steps += 1
        self.requests += step.requests
        self.nodes += sum(step.nodes.values())
        self.ms += ms
        self.predicted += float(predicted)

    @property
    def enough(self) -> bool:
        """Whether to say it: after so much decoding, however long nothing was to do meanwhile."""
        return self.ms > _LOG_EVERY

    def __str__(self) -> str:
        return (
            f"Medusa: {self.nodes / self.steps:.1f} draft nodes a step for "
            f"{self.requests / self.steps:.1f} requests, {self.accepted / self.requests:.2f} "
            f"accepted by each; a step took {self.ms / self.steps:.1f} ms "
            f"({self.predicted / self.steps:.1f} expected), {self.steps} steps."
        )


class TreeScheduler(GrammarScheduler, Scheduler):
    """Schedules as vLLM does, with the drafts that are worth their time."""

    outlook: type[Outlook] = Outlook  # what is expected of drafts
    decides: type[NodeBudget] = NodeBudget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = EngineOptions.of(self.vllm_config)
        self._most = options.tree.num_draft_tokens  # of a request
        self._num_heads = options.tree.max_depth
        self._even = False  # copies come with no more drafts than are said beforehand
        self._copies = options.lookup
        self._forced = False  # drafts that wait, or were looked at, were forced by grammars alone
        self._turn = 0  # of the requests whose runs are looked at where they don't pay
        self._looked = options.lookup  # for drafts that no head is needed for, in the last step
        self._max_rows = options.max_rows
        # what step costs are of, and where they are kept
        self.costs_of = costs_of(self.vllm_config) | {"rows": str(self.most_rows())}
        self.costs_at = cost_path(Path(envs.VLLM_CACHE_ROOT) / "medusa", self.costs_of)
        self._kept_at, self._kept_steps = time.perf_counter(), 0
        fixed = isinstance(options.budget, int)
        self.budget = None if fixed else self._learned()
        # runs that grammars force are drafted in steps without heads too
        self._forces = not fixed and not uses_v2_runner(self.vllm_config.parallel_config)
        self.dynamic_sd_lookup = _Counts(self)  # type: ignore[assignment]
        self._seen = _Seen()
        self._report = StepReport()
        self._step: Step | None = None
        self._last: Step | None = None  # whose time ends when the next one starts
        self._survival: dict[str, list[float]] = {}  # of drafts that wait to be verified
        self._proposed_by: dict[str, list[int]] = {}  # see `lookup.merge`, of those with copies
        self._told_drafts: dict[str, list[int]] = {}  # where the scheduler has placeholders
        self._of_copies: dict[str, int] = {}  # accepted drafts of the step that were copied
        self._drafted = self._most  # `Step.limit` when they were drafted
        self._fates: list[_Fate] = []  # of the last steps' drafts, not learned yet
        # their limit, whether copies were looked for, and whether any draft was verified
        self._fates_of = (0, False, False)
        self._kinds: list[int] = []  # of the running requests
        self._blocked = False  # requests wait although there were rows for them
        self.prefills = 0.0  # how often, of late, a step had one

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and take its time from the start of one step to that of the next."""
        now = time.perf_counter()
        if self._last is not None:
            self._learn_cost(self._last, 1e3 * (now - self._last.started))
            self._last = None
            self._keep_costs_at_times(now)
        self.spent.begin()
        output = super().schedule(*args, **kwargs)
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        self._blocked = bool(self.waiting) and (
            output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
        )
        nodes = {req_id: len(tokens) for req_id, tokens in drafts.items()}
        self._step = Step(
            started=now,
            rows=output.total_num_scheduled_tokens,
            requests=len(scheduled),
            limit=output.num_spec_tokens_to_schedule,
            prefill=any(n != 1 + nodes.get(req_id, 0) for req_id, n in scheduled.items()),
            nodes=nodes,
        )
        self.prefills += (self._step.prefill - self.prefills) / _PREFILL_STEPS
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Learn what was accepted; the rest is vLLM's."""
        step, self._step = self._step, None
        self._of_copies = {}
        if step is not None and step.requests:
            nodes = sum(step.nodes.values())
            drafted = step.limit > 0 and self._num_heads > 0
            self._report.add(step.requests, nodes, prefill=step.prefill, drafted=drafted)
            if self._proposed_by and nodes:
                self._report.copied += self._accepted_copies(scheduler_output, model_runner_output)
        if step is not None and self._survival and self.budget is not None:
            began = time.perf_counter()
            self._learn_acceptance(self.budget, step, model_runner_output)
            if self._forced:
                self.spent.on_forcing(0, time.perf_counter() - began)
        result = super().update_from_output(scheduler_output, model_runner_output)
        if step is not None and step.requests:
            self._drafted = step.limit
            self._ended(step)
        if not self.has_unfinished_requests():
            self._keep_costs_at_times(time.perf_counter(), _KEEP_IDLE)
        return result

    def _ended(self, step: Step) -> None:
        """Time a step whose output came."""
        if self.has_unfinished_requests():
            self._last = step  # the next one follows at once
        else:
            self._learn_cost(step, 1e3 * (time.perf_counter() - step.started))

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Add what the steps were like to vLLM's numbers, for the front end's metrics."""
        if self.log_stats:
            spec_decoding_stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
            if self.budget is not None:
                self._report.ratio = round(1e3 * self.budget.expected_ratio)
            self._report.put_into(spec_decoding_stats)
            self._report = StepReport()
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Cut the drafts to what the next step verifies."""
        req_ids, drafts = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        survival = getattr(draft_token_ids, "survival", None) or [[] for _ in drafts]
        began, self._forced = time.perf_counter(), False
        free, has_prefill = self._next_rows()
        chosen = self.choose(draft_token_ids)
        unknown: set[str] = set()
        self._looked = self._copies
        if self._forces:
            unknown = self._force(draft_token_ids, chosen, room=free > 0 and not has_prefill)
        if chosen:
            places = [index for index, req_id in enumerate(req_ids) if req_id in chosen]
            drafts, survival = list(drafts), list(survival)
            for index in places:
                own = chosen[req_ids[index]]
                drafts[index], survival[index] = own.token_ids, own.survival
        self._proposed_by = dict(getattr(draft_token_ids, "proposed_by", None) or {})
        self._proposed_by |= {req_id: own.forced for req_id, own in chosen.items() if own.forced}
        if any(drafts):
            worth: Sequence[Sequence[float] | Floats] = survival
            total = free
            if self.budget is not None and has_prefill:
                total = 0  # rows cost what arithmetic costs then, which drafts rarely earn
            elif self.budget is not None:
                outlook, sizes = self.budget.outlook, [len(values) for values in survival]
                kinds = np.repeat([self._kind(req_id) for req_id in req_ids], sizes)
                values = np.concatenate(survival)
                copied = None
                if self._proposed_by:
                    by = [
                        self._proposed_by.get(r, [0] * n)
                        for r, n in zip(req_ids, sizes, strict=True)
                    ]
                    copied = np.concatenate(by) > 0
                gain = outlook.gain_of(values, kinds, copied)
                total = self.budget.choose(gain, len(self.running), free)
                if np.count_nonzero(sizes) > 1:  # of one request, the best are the first
                    believed = outlook.corrected(values, kinds, copied)
                    worth = np.split(believed, np.cumsum(sizes)[:-1])
            counts = share(worth, total)
            drafts = [tokens[:n] for tokens, n in zip(drafts, counts, strict=True)]
        self._report.chosen = sum(map(len, drafts))
        self._survival = {
            req_id: values
            for req_id, values in zip(req_ids, survival, strict=True)
            if req_id not in unknown
        }
        self.offer(req_ids, drafts, chosen)
        if self._forced:
            copying = self.budget is not None and self.budget.copying
            requests = len(chosen) if copying else 0
            self.spent.on_forcing(requests, time.perf_counter() - began)

    def _force(
        self, draft_token_ids: DraftTokenIds, chosen: dict[str, Any], *, room: bool
    ) -> set[str]:
        """Add what grammars force to ``chosen`` if no head drafted; which were left out.

        Where such runs don't pay, a request now and then tells what they would bring.
        """
        assert self.budget is not None
        follow = [
            req_id
            for req_id in draft_token_ids.req_ids
            if (request := self.requests.get(req_id)) is not None and request.use_structured_output
        ]
        if not follow:
            self._looked |= self.budget.outlook.copies
            return set()
        if chosen:
            self._looked = True
            return set(follow) - set(chosen)
        asked: list[str] = []
        if room and self.budget.copying:
            asked = follow
        elif room:
            self._turn += 1
            asked = [follow[self._turn // _TURNS % len(follow)]] if self._turn % _TURNS == 0 else []
        chosen |= self.force(asked)
        self._looked |= bool(asked)
        self._forced = bool(asked)
        return set(follow) - set(asked)

    def shutdown(self) -> None:
        """Keep what was learned; the rest is vLLM's."""
        self._keep_costs()
        super().shutdown()

    def most_rows(self) -> int:
        """Rows that a decoding step can have."""
        most = self.scheduler_config.max_num_seqs * (1 + self._most)
        return min(self.max_num_scheduled_tokens, most)

    def known_costs(self) -> tuple[StepCost, str]:
        """What earlier engines of the kind have learned, or nothing yet and the reason."""
        return load_cost(self.costs_at, self.costs_of, self.most_rows())

    def _learned(self) -> NodeBudget:
        cost, problem = self.known_costs()
        if problem:
            compat.logger.info("Step costs are measured anew: %s", problem)
        self._kept_steps = cost.steps
        taus = EngineOptions.of(self.vllm_config).taus
        outlook = self.outlook(taus) if taus else self.outlook()
        return self.decides(cost, outlook, self._most, self._num_heads)

    def _keep_costs_at_times(self, now: float, every: float = _KEEP_EVERY) -> None:
        if now - self._kept_at > every:
            self._keep_costs()

    def _keep_costs(self) -> None:
        """Write the costs down, if there is anything new."""
        if self.budget is None or self.budget.cost.steps - self._kept_steps < _WORTH_KEEPING:
            return
        self._kept_at, self._kept_steps = time.perf_counter(), self.budget.cost.steps
        tag = f"{os.getpid()}.part"
        if problem := save_cost(self.costs_at, self.costs_of, self.budget.cost, tag):
            compat.logger.warning_once("Step costs are not kept: %s", problem)

    def _next_rows(self) -> tuple[int, bool]:
        """Rows of the next step that no request has a use for, and whether it has a prefill."""
        admits = len(self.running) < self.max_num_running_reqs and not self._blocked
        coming = itertools.chain(self.running, self.waiting if admits else ())
        most, taken, has_prefill = self.max_num_scheduled_tokens, 0, False
        for request in coming:
            rows = max(1, request.num_tokens - request.num_computed_tokens)
            has_prefill |= rows > 1
            taken += rows
            if taken >= most:
                return 0, has_prefill
        free = min(most - taken, self._free_slots())
        if self._max_rows is not None:
            free = min(free, self._max_rows - len(self.running))
        return max(0, free), has_prefill

    def _free_slots(self) -> int:
        """KV slots that drafts can have without a running request being preempted for them.

        Each request may need a block for itself and one more for the ragged end of its drafts.
        What vLLM reserves behind them (an EAGLE drafter's scratch) it has since its prefill.
        """
        groups = len(self.kv_cache_config.kv_cache_groups)
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks() // groups
        return max(0, blocks - 2 * len(self.running)) * self.block_size

    def _learn_cost(self, step: Step, ms: float) -> None:
        if self.budget is None or step.prefill:
            return
        heads = self.budget.share_of(step.limit)
        if self.log_stats:
            expected = self.budget.cost.ms(step.rows, step.requests, heads)
            self._report.time(ms, expected)
            self._seen.add(step, ms, expected)
            if self._seen.enough:
                compat.logger.info("%s", self._seen)
                self._seen = _Seen()
        self.budget.observe(step.rows, step.requests, heads, ms - 1e3 * self.spent.seconds)

    def expect_kinds(self, budget: NodeBudget) -> None:
        """Tell the budget what kinds of requests run: drafts of some are worth more."""
        kinds = [self._kind(request.request_id) for request in self.running]
        follow = sum(kind > 1 for kind in kinds)
        budget.surcharge = self.spent.surcharge(follow / max(len(kinds), 1))
        if kinds != self._kinds:
            self._kinds = kinds
            budget.expect(kinds)

    def _kind(self, req_id: str) -> int:
        """Of a request, see `Outlook`: greedy or sampled, with a grammar or without."""
        request = self.requests.get(req_id)
        params = None if request is None else request.sampling_params
        sampled = params is None or params.temperature >= GREEDY_BELOW
        return int(sampled) + 2 * follows_grammar(params)

    def _learn_acceptance(self, budget: NodeBudget, step: Step, output: Any) -> None:
        """Compare what was accepted with the survivals of all that was drafted.

        Requests of whose drafts none was verified count too: else only sure ones would be seen.
        """
        fates = [
            _Fate(
                values,
                self._kind(req_id),
                step.nodes.get(req_id, 0),
                len(output.sampled_token_ids[index]) - 1,
                self._of_copies.get(req_id, 0),
                self._proposed_by.get(req_id),
            )
            for req_id, values in self._survival.items()
            if (values or self._looked)
            and (index := output.req_id_to_index.get(req_id)) is not None
            and output.sampled_token_ids[index]
        ]
        self._survival = {}
        if not fates:
            return
        self._seen.accepted += sum(fate.accepted for fate in fates)
        limit = self._drafted if self._num_heads or self._even else 0
        of = limit, self._looked, bool(step.nodes)
        if of != self._fates_of:
            self._learn_fates(budget.outlook)
        self._fates_of = of
        self._fates += fates
        if len(self._fates) >= _TOGETHER:
            self._learn_fates(budget.outlook)

    def _learn_fates(self, outlook: Outlook) -> None:
        """Hand on what became of the drafts of steps that were alike."""
        fates, self._fates = self._fates, []
        if not fates:
            return
        limit, looked, verified = self._fates_of
        survival = np.zeros((len(fates), max(1, *(len(fate.survival) for fate in fates))))
        copied = np.zeros(survival.shape, np.bool_) if looked else None
        for row, fate in enumerate(fates):
            survival[row, : len(fate.survival)] = fate.survival
            if copied is not None and fate.proposed_by is not None:
                copied[row, : len(fate.proposed_by)] = np.array(fate.proposed_by) > 0
        kinds = np.array([fate.kind for fate in fates])
        nodes = [fate.verified for fate in fates] if verified else ()
        right = [fate.accepted - fate.of_copies for fate in fates] if verified else ()
        outlook.observe(survival, nodes, right, kinds, limit, copied)

    def _accepted_copies(self, scheduler_output: SchedulerOutput, output: Any) -> int:
        """Accepted drafts of a step that lookup alone proposed."""
        alone = 0
        for req_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            by, index = self._proposed_by.get(req_id), output.req_id_to_index.get(req_id)
            if by is None or index is None:
                continue
            accepted = output.sampled_token_ids[index][:-1]
            tokens = self._told_drafts.get(req_id, tokens)[: len(tokens)]
            chain = [(token, who) for token, who in zip(tokens, by, strict=False) if who]
            pairs = itertools.takewhile(
                lambda pair: pair[0][0] == pair[1], zip(chain, accepted, strict=False)
            )
            path = [who for (_, who), _ in pairs]
            self._of_copies[req_id] = len(path)
            alone += path.count(FROM_LOOKUP)
        return alone


def tree_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> GrammarScheduler:
    """The scheduler that goes with how an engine schedules, which vLLM decides last of all."""
    ahead = vllm_config.scheduler_config.async_scheduling
    if EngineOptions.of(vllm_config).budget is None:
        kind = GrammarAsyncScheduler if ahead else GrammarScheduler
        return kind(vllm_config, *args, **kwargs)
    if not ahead:
        return TreeScheduler(vllm_config, *args, **kwargs)
    from vllm_medusa.worker.async_scheduler import TreeAsyncScheduler

    return TreeAsyncScheduler(vllm_config, *args, **kwargs)


def costs_of(config: Any) -> dict[str, str]:
    """What step costs depend on, as far as it is known beforehand."""
    model, parallel = config.model_config, config.parallel_config
    options = EngineOptions.of(config)
    beam = getattr(options.tree, "pool", None)
    found = {
        "target": absolute(str(model.model)),
        "revision": str(model.revision),
        "heads": options.heads or "",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "device": f"{current_platform.get_device_name()} {platform.machine()}",
        "threads": f"{os.cpu_count()} {envs.VLLM_CPU_OMP_THREADS_BIND}",
        "ranks": str(parallel.tensor_parallel_size),
        "eager": str(model.enforce_eager),
        "adapters": str(config.lora_config is not None),
        "runner": "V2" if compat.uses_v2_runner(parallel) else "V1",
        "vllm": installed_vllm()[1] or "",
        **({"beam": str(beam)} if isinstance(beam, Beam) else {}),
    }
    return found | {"lookup": "True"} if options.lookup else found


class _Counts:
    """How many drafts each request may get at the end of a step."""

    def __init__(self, scheduler: TreeScheduler) -> None:
        self.scheduler = scheduler

    def __getitem__(self, num_requests: int) -> int:
        scheduler = self.scheduler
        if scheduler.budget is None:
            return scheduler._most
        free = scheduler.max_num_scheduled_tokens - num_requests
        if scheduler._max_rows is not None:
            free = min(free, scheduler._max_rows - num_requests)
        scheduler.expect_kinds(scheduler.budget)
        return scheduler.budget.draft_next(num_requests, free, scheduler.prefills)


def share(survival: Sequence[Sequence[float] | Floats], total: int) -> list[int]:
    """How many drafts each request keeps if the best ``total`` of all are kept; ties to the first.

    What is kept of each is a prefix.
    """
    sizes = [len(values) for values in survival]
    if sum(sizes) <= total:
        return sizes
    flat = np.concatenate([np.asarray(values) for values in survival])
    owners = np.repeat(np.arange(len(sizes)), sizes)
    best = np.argsort(-flat, kind="stable")[:total]
    return np.bincount(owners[best], minlength=len(sizes)).tolist()
