"""A vLLM engine in a subprocess that runs and times groups of prompts.

Several engines can be idle while one is timed, and ending one frees its memory. Times are
measured in the engine's process; its output goes to a log, whose end is quoted in errors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_medusa.offline.batch import Conversation, Result, Session, run_batch
from vllm_medusa.offline.children import ERROR, Channel, Child
from vllm_medusa.offline.engine import EngineRefused, Sampling, VllmEngine
from vllm_medusa.offline.prompts import Prompt


class EngineProcess:
    """A started engine, a `vllm_medusa.offline.in_turn.Runner`; use it as a context manager."""

    def __init__(self, arguments: Mapping[str, Any], sampling: Sampling, *, seeded: bool = True):
        """Start the engine with ``LLM``'s arguments and wait until it is ready.

        ``seeded``: runs above temperature 0 will have a seed; on CPUs ``sampling`` must then have a
        temperature above 0.

        Raises EngineRefused: vLLM or the plugin refuses the settings, or a file is missing;
        JobFailed: the engine or its process failed; the message has the end of its log.
        """
        self.sampling = sampling  # of later runs; may be replaced
        self.session: Callable[[Prompt], Session] = Conversation  # session type; may be replaced
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-medusa-")  # noqa: SIM115
        self._child = Child("an engine", serve, Path(self._log.name))
        self.pid = self._child.process.pid
        self._child.channel.send((arguments, sampling, seeded and sampling.temperature > 0))
        try:
            _, dtype = self._child.receive()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        self.dtype: str = dtype  # compute dtype, such as "float32"

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """See `vllm_medusa.offline.in_turn.Runner`."""
        return list(self.stream(prompts, concurrency, seed)), self.seconds

    def stream(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> Iterator[Result]:
        """Yield the same results, each as it finishes; then ``seconds`` is set to the total."""
        how = {"concurrency": concurrency, "seed": seed, "session": self.session}
        self._child.channel.send((list(prompts), how, self.sampling))
        while (message := self._child.receive())[0] == "result":
            yield message[1]
        self.seconds: float = message[1]

    def count(self, name: str) -> float:
        """A counter of the engine's metrics, by the end of its name, summed over labels."""
        self._child.channel.send(name)
        return float(self._child.receive()[1])

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._child.process.kill()  # its results are not needed
        self._child.end()
        self._log.close()


def serve(channel: Channel) -> None:
    """The body of the process: run groups and read counters until the channel is closed."""
    from vllm_medusa.config import run_engines_in_this_process

    run_engines_in_this_process()
    arguments, sampling, seeded = channel.recv()
    try:
        engine = VllmEngine(arguments, sampling, seeded=seeded)
    except EngineRefused as error:
        channel.send((ERROR, EngineRefused(str(error))))
        return
    channel.send(("ready", str(engine.llm.llm_engine.model_config.dtype).removeprefix("torch.")))
    while True:
        try:
            request = channel.recv()
        except EOFError:
            engine.close()
            return
        if isinstance(request, str):
            metrics = [m for m in engine.llm.get_metrics() if m.name.endswith(request)]
            channel.send(("count", float(sum(getattr(m, "value", 0) for m in metrics))))
            continue
        prompts, how, engine.sampling = request
        start = time.perf_counter()
        for result in run_batch(prompts, engine, **how):
            channel.send(("result", result))
        channel.send(("seconds", time.perf_counter() - start))
