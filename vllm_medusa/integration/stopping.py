"""Fail open requests on shutdown, and record whether the engine died before.

On SIGTERM vLLM stops its engine and then waits for open connections; their streams wait for tokens
of the stopped engine, until the clients disconnect. When the engine dies the server ends too, but
with status 0: `vllm-medusa serve` reads `died` and returns 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.utils.async_utils import run_in_loop
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_medusa.integration.overrides import override
from vllm_medusa.integration.startup.options import has_trees

died = False  # an engine of this process died before it was stopped


class ServerStopped(EngineDeadError):
    """The engine stopped before the answer was complete."""

    def __str__(self) -> str:
        return "The server was stopped before the response was complete. Retry on another server."


def install() -> None:
    """Fail open requests when the engine is stopped."""
    override(AsyncLLM, "shutdown", _shutdown)


def _shutdown(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    global died
    if not getattr(self, "stopped_once", False):
        self.stopped_once = True
        died |= hasattr(self, "engine_core") and self.errored
    handler = getattr(self, "output_handler", None)
    original(self, *args, **kwargs)
    if handler is not None and has_trees(self.vllm_config.speculative_config):
        # in the requests' event loop, which runs in another thread
        run_in_loop(handler.get_loop(), self.output_processor.propagate_error, ServerStopped())
