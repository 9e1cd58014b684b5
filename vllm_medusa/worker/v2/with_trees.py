"""What our workers add to vLLM's, whatever the platform."""

from __future__ import annotations

from typing import Any, cast

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.worker_base import WorkerBase

from vllm_medusa.worker import compat
from vllm_medusa.worker.weights import heads_left_out


class WithTrees(WorkerBase):
    """Mixed into a worker of vLLM: its V2 runner gets our speculator and tree attention."""

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
        return times

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target and the heads; heads in the target's checkpoint are no part of it."""
        with heads_left_out():
            super().load_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Verify and draft; what the verified drafts were worth goes to an asynchronous scheduler.

        vLLM's output is on its way to the host here too, and holds what is attached to it.
        """
        survival = None
        if self.vllm_config.scheduler_config.async_scheduling:
            survival = cast(Any, self.model_runner).speculator.survival()
        output = super().sample_tokens(*args, **kwargs)
        if survival is not None and isinstance(output, AsyncOutput):
            output.model_runner_output.tree_survival = survival  # type: ignore[attr-defined]
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Tell the scheduler what was drafted: nothing for requests that follow a grammar.

        vLLM asks where it schedules synchronously, or has a grammar to check drafts against. It
        then schedules no drafts for them, or (async, where it has done so) counts none. Drafts of
        dynamic trees go with what they are worth.
        """
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        state: Any = self.model_runner
        drafts = state.speculator.worth(drafts)
        undrafted = state.speculator.trees.requests.is_undrafted
        slots = state.req_states.req_id_to_index
        for place, req_id in enumerate(drafts.req_ids):
            if req_id in slots and undrafted(slots[req_id]):
                drafts.draft_token_ids[place] = []
        return drafts
