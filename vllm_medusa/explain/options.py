"""What `explain` is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.options import Number, Options, Positive, Source, group, option
from vllm_medusa.tree.dynamic import MOST_DRAFTS
from vllm_medusa.tree.topology import MAX_NODES


class MeasuredOptions(Options):
    """What the engine that is measured was started with; absent: whatever it was."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = option(default=None)
    eager: Literal["yes", "no"] | None = option("whether with --enforce-eager", default=None)
    tensor_parallel_size: Positive | None = option(default=None, metavar="N")
    quantization: str | None = option(default=None)
    revision: str | None = option("of the target", default=None)
    runner: Literal["V1", "V2"] | None = option("vLLM's model runner", default=None)
    lookup: Literal["yes", "no"] | None = option('whether with "lookup"', default=None)

    def wanted(self) -> dict[str, str]:
        """What is asked for, as kept step costs name it."""
        asked = {
            "dtype": self.dtype and f"torch.{self.dtype}",
            "eager": self.eager and str(self.eager == "yes"),
            "ranks": self.tensor_parallel_size and str(self.tensor_parallel_size),
            "quantization": self.quantization,
            "revision": self.revision,
            "runner": self.runner,
            "lookup": self.lookup and str(self.lookup == "yes"),
        }
        return {name: value for name, value in asked.items() if value}


class ExplainOptions(Options):
    """Options of `vllm_medusa.explain.job.explain` and of `vllm-medusa explain`."""

    target: Source = option("a folder or a hub name", positional=True)
    heads: Source = option("a folder, a file or a hub name", positional=True)
    costs: Path | None = option(
        "a file of step costs, or a folder of them; absent: vLLM's cache", default=None
    )
    num_speculative_tokens: Annotated[int, Number(int, 1, MAX_NODES - 1)] = option(
        "at most N draft nodes a request", default=MOST_DRAFTS, metavar="N"
    )
    plot: Path | None = option("a picture: .png, .svg or .pdf", default=None, metavar="FILE")
    measure: bool = option("start an engine first, to measure what isn't kept", default=False)
    engine_args: dict[str, Any] = option(
        "more LLM arguments for --measure", default={}, metavar="JSON"
    )
    measured: MeasuredOptions = group(
        "engine that was measured (the latest of those that fit)", factory=MeasuredOptions
    )

    def check(self) -> None:
        """See `Options.check`."""
        if not self.measure and self.engine_args:
            raise ValueError(f"--engine-args {self.engine_args} is for --measure: give that too.")
        if self.measure and self.costs is not None:
            raise ValueError(
                f"--costs {self.costs} is read, but --measure writes into vLLM's cache: drop one."
            )
        if self.measure and self.measured.runner is not None:
            raise ValueError(
                f"--runner {self.measured.runner} can't be asked of an engine: set "
                "VLLM_USE_V2_MODEL_RUNNER, or drop --measure."
            )
