"""The V2 worker: vLLM's worker for the platform, with trees added to its runner."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
from vllm.platforms import current_platform

if current_platform.is_cpu():  # imported before any V2 module, because it adapts them to the CPU
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from vllm_medusa.integration.attention import install_attention
from vllm_medusa.integration.drafters.draft_messages import tree_parents
from vllm_medusa.integration.target import heads_left_out


class MedusaWorker(Worker):
    """Builds vLLM's V2 runner with our speculator and tree attention."""

    def init_device(self) -> None:
        """Register tree attention and the speculator, then build the runner."""
        from vllm_medusa.integration.v2.speculator import install

        install_attention()
        install()
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Compile our kernels too, before graphs are captured; then time steps."""
        from vllm_medusa.integration.startup.startup_timing import measure_step_costs
        from vllm_medusa.integration.v2.cuda_warmup import warm_up

        if self.vllm_config.kernel_config.enable_jit_warmup:
            warm_up(self.model_runner)
        times = super().compile_or_warm_up_model()
        measure_step_costs(self)
        if (lookup := cast(Any, self.model_runner).speculator.trees.lookup) is not None:
            lookup.forget()  # dummy requests are not representative
        return times

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target, skipping heads in its checkpoint, then the heads."""
        with heads_left_out():
            super().load_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Verify and draft; send survivals of verified drafts to an asynchronous scheduler.

        vLLM's output is still being copied to the host here; attributes set on it are sent with it.
        """
        sent = {}
        if self.vllm_config.scheduler_config.async_scheduling:
            sent = cast(Any, self.model_runner).speculator.sent_with_output()
        output = super().sample_tokens(*args, **kwargs)
        if isinstance(output, AsyncOutput):
            vars(output.model_runner_output).update(sent)
        return output

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Use the trees chosen by the scheduler for requests with a grammar.

        Their tokens replace the drafts on the device; other requests keep theirs.
        """
        runner: Any = self.model_runner
        runner.speculator.before_step(scheduler_output)
        ahead = self.vllm_config.scheduler_config.async_scheduling
        # the number of draft tokens limits the heads' drafts, but not those of lookup
        if runner.speculator.trees.lookup is not None and not ahead:
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
        """Send the drafts to the scheduler; those of requests with a grammar are candidates.

        vLLM calls this if it schedules synchronously or a request has a grammar. Drafts
        of dynamic trees have their survivals, unless these are sent with the outputs.
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
