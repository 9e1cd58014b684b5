"""A vLLM engine in a process of its own that runs groups of prompts and says how long they took.

Several engines can then wait beside each other while one is timed, and ending one gives its memory
back whatever vLLM still holds. The clock runs in the engine's process, so that neither the way
there nor the caller counts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeAlias

from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.children import die_with
from vllm_medusa.offline.engine import EngineRefused, EngineSettings, Sampling
from vllm_medusa.offline.prompts import Prompt

Channel: TypeAlias = "Connection[Any, Any]"

_STOP_SECONDS = 30
_SHOWN_LINES = 25


class EngineDied(RuntimeError):
    """An engine's process that ended by itself; the message has the end of its log."""


class EngineProcess:
    """A started engine; use it as a context manager.

    It is a `vllm_medusa.offline.compare.Runner`.
    """

    def __init__(self, settings: EngineSettings, sampling: Sampling):
        """Start the engine and wait until it is ready.

        Args:
            settings: model and engine options.
            sampling: of every request.

        Raises:
            EngineRefused: vLLM or the plugin refuses the settings, or a file is missing.
            EngineDied: the process ended.

        """
        self._log = tempfile.TemporaryFile(prefix="vllm-medusa-")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C is this process's business
        )
        theirs.close()
        self._channel: Channel = Connection(ours.detach())
        self._channel.send((settings, sampling))
        try:
            self.dtype: str = self._reply()  # what the target computes in, such as "float32"
        except BaseException:
            self.close()
            raise

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """Generate for a group of prompts; see `vllm_medusa.offline.compare.Runner`."""
        self._channel.send((list(prompts), concurrency, seed))
        return self._reply()

    def close(self) -> None:
        """End the process."""
        self._channel.close()  # the child's loop ends with it
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()  # nobody waits for what it is doing
        self.close()

    def _reply(self) -> Any:
        try:
            kind, value = self._channel.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait(_STOP_SECONDS)
            raise EngineDied(
                f"an engine ended with status {status}; the end of its log:\n" + self._log_end()
            ) from None
        if kind == "refused":
            raise EngineRefused(value)
        if kind == "failed":
            raise EngineDied(f"an engine failed: {value}; the end of its log:\n{self._log_end()}")
        return value

    def _log_end(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:])


def serve(channel: Channel) -> None:
    """Run groups until the channel is closed; the body of the process."""
    from vllm_medusa.config import run_engines_in_this_process

    run_engines_in_this_process()
    from vllm_medusa.offline.batch import run_batch
    from vllm_medusa.offline.engine import VllmEngine

    settings, sampling = channel.recv()
    try:
        engine = VllmEngine(settings, sampling, seeded=sampling.temperature > 0)
    except EngineRefused as error:
        channel.send(("refused", str(error)))
        return
    except Exception as error:
        channel.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    channel.send(("ready", str(engine.llm.llm_engine.model_config.dtype).removeprefix("torch.")))
    while True:
        try:
            prompts, concurrency, seed = channel.recv()
        except EOFError:
            engine.close()
            return
        try:
            start = time.perf_counter()
            results = list(run_batch(prompts, engine, concurrency=concurrency, seed=seed))
            seconds = time.perf_counter() - start
        except Exception as error:
            channel.send(("failed", f"{type(error).__name__}: {error}"))
            raise
        channel.send(("results", (results, seconds)))


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
