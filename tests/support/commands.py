"""Run commands and conversions in this process, record progress, and kill work midway."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_medusa import cli
from vllm_medusa.convert import job
from vllm_medusa.convert.options import ConvertOptions
from vllm_medusa.job import Progress


def run(*words: object) -> int:
    """Run `vllm-medusa` with these arguments, as a user would type them; returns its status."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return int(ended.value.code or 0)


def said(captured: pytest.CaptureFixture[str]) -> str:
    """Standard error since the last call, on one line."""
    return " ".join(captured.readouterr().err.split())


def convert(
    source: str | Path, to: str, output: Path, *, provenance: Any = None, **options: Any
) -> job.Conversion:
    """`vllm_medusa.convert.job.convert` with its options as keyword arguments."""
    given = ConvertOptions(source=str(source), to=to, output=output, **options)
    return job.convert(given, provenance=provenance)


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


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> bool:
    """Run ``work`` in a child; returns whether signal 9 ended it before it finished."""
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # instead of waiting forever
        try:
            work()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 3
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
