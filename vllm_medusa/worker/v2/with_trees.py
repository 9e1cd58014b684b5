"""Additions of our workers to vLLM's, for all platforms."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.worker_base import WorkerBase

from vllm_medusa.worker import compat
from vllm_medusa.worker.drafts import tree_parents
from vllm_medusa.worker.target import heads_left_out


class WithTrees(WorkerBase):
    """Mixin for vLLM's workers: adds our speculator and tree attention to the V2 runner."""

    def init_device(self) -> None:
        """Register tree attention and the speculator, then build the runner."""
        from vllm_medusa.worker.v2.platform import tree_backend
        from vllm_medusa.worker.v2.speculator import install

        backend = tree_backend()
        register_backend(AttentionBackendEnum[backend.name], backend.path)
        compat.forget_attention_backends()
        install()
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Compile our kernels too, before graphs are captured; then time steps."""
        from vllm_medusa.worker.practice import measure_step_costs
        from vllm_medusa.worker.v2.cuda_warmup import warm_up

        if self.vllm_config.kernel_config.enable_jit_warmup:
            warm_up(self.model_runner)
        times = super().compile_or_warm_up_model()
        measure_step_costs(self)
        if (lookup := cast(Any, self.model_runner).speculator.trees.lookup) is not None:
            lookup.forget()  # dummy requests are not representative
        return times

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target without heads in its checkpoint, and the heads."""
        with heads_left_out():
            super().load_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Verify and draft; send survivals of verified drafts to an asynchronous scheduler.

        vLLM's output is also being copied to the host here, with everything attached to it.
        """
        survival = copies = None
        if self.vllm_config.scheduler_config.async_scheduling:
            speculator = cast(Any, self.model_runner).speculator
            survival, copies = speculator.survival(), speculator.copies()
        output = super().sample_tokens(*args, **kwargs)
        if survival is not None and isinstance(output, AsyncOutput):
            of_step: Any = output.model_runner_output
            of_step.tree_survival, of_step.tree_copies = survival, copies
        return output

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Receive the trees chosen by the scheduler, for requests with a grammar.

        Their tokens replace the drafts on the device, where all other requests' drafts are.
        """
        runner: Any = self.model_runner
        ahead = self.vllm_config.scheduler_config.async_scheduling
        if runner.speculator.trees.lookup is not None and not ahead:  # copies need no limit
            runner.speculator.limit = scheduler_output.num_spec_tokens_to_schedule
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_spec_tokens_to_schedule = runner.num_speculative_steps
        chosen = tree_parents(scheduler_output)
        runner.speculator.trees.chosen_parents = chosen
        if chosen:
            states, drafts = runner.req_states, scheduler_output.scheduled_spec_decode_tokens
            tokens = np.zeros((len(chosen), max(map(len, chosen.values()))), dtype=np.int64)
            for row, req_id in zip(tokens, chosen, strict=True):
                row[: len(chosen[req_id])] = drafts[req_id]
            slots = np.array([states.req_id_to_index[req_id] for req_id in chosen])
            device = states.draft_tokens.device
            states.draft_tokens[async_tensor_h2d(slots, device=device), : tokens.shape[1]] = (
                async_tensor_h2d(tokens, device=device)
            )
        return super().execute_model(scheduler_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Send the drafts to the scheduler; for requests with a grammar, as candidates.

        vLLM calls it with synchronous scheduling, or with a grammar that checks drafts. Drafts
        of dynamic trees are sent with their survivals, unless these are sent with outputs.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        runner: Any = self.model_runner
        speculator, slots = runner.speculator, runner.req_states.req_id_to_index
        requests = speculator.trees.requests
        structured = [
            req_id in slots and bool(requests.follows_grammar(slots[req_id]))
            for req_id in drafts.req_ids
        ]
        last: DraftTokenIds = speculator.last_drafts(drafts, structured)
        return last
