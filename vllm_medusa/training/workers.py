"""The processes of one training run: one, or several with ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor, nn

# Other processes wait while one merges, measures or builds the last shard; NCCL's default is 10
# minutes. If a process dies, the launcher ends the others.
_TIMEOUT = timedelta(days=2)


def usable(device: str) -> torch.device:
    """A device by name.

    Raises ValueError: torch has no such device here.
    """
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--device {device} can't be used here ({reason}). Use cpu, cuda, e.g. "
            "cuda:1, or auto for a GPU if available."
        ) from None
    return found


class Workers:
    """The current process's view of all processes.

    Attributes:
        rank: this process's number; 0 is the main process, the only one that writes.
        world: number of processes.
        device: device of this process.

    """

    def __init__(self, device: str = "auto") -> None:
        """Join the processes started by `accelerate launch` (or torchrun), if any.

        ``device`` is "cpu", "cuda", "cuda:1", or "auto": a GPU per process if available.
        """
        from accelerate import PartialState

        self._state = PartialState(cpu=device == "cpu", timeout=_TIMEOUT)
        self.rank, self.world = self._state.process_index, self._state.num_processes
        chosen = self._state.device if device == "auto" or self.world > 1 else usable(device)
        found = torch.device(chosen)  # accelerate's "cpu:0" can't hold saved states
        self.device = torch.device("cpu") if found.type == "cpu" else found

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Return when all processes have called it."""
        self._state.wait_for_everyone()

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, on all of them."""
        if self.world == 1:
            return tensor
        from accelerate.utils import reduce

        return reduce(tensor.to(self.device), "sum")

    def share_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the processes; a process without work in this step adds zeros."""
        for parameter in parameters if self.world > 1 else ():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.add_up(grad)
