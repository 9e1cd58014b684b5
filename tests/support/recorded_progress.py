"""Records a job's messages."""

from typing import Any

from vllm_medusa.job import Progress


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.counts: list[tuple[Any, ...]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def at(self, *values: Any) -> None:
        self.counts.append(values)
