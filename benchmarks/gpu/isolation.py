"""Run cases in processes of their own, so that the worst a case can do is to lose its process.

A GPU kernel that reads where it must not leaves its process without a GPU; one that never ends
can't be stopped from inside. So the cases run in a child that writes a line when a case starts and
one when it ends. If the child ends early, or a case stalls, that case gets an error and a new child
goes on behind it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.cases import BROKEN, Record

START_SECONDS = 5  # with less than this left no child is started
_POLL = 0.1


@dataclass(frozen=True)
class Limits:
    """Seconds: ``total`` for all cases together, ``stall`` for any one of them."""

    total: float
    stall: float


def run_isolated(
    command: Sequence[str],
    names: Sequence[str],
    folder: Path,
    limits: Limits,
    report: Callable[[Record], None],
) -> list[Record]:
    """Records of all ``names``, in their order.

    ``command`` is called with ``--names FILE --lines FILE``: the names that are left, one a line,
    and the file to which `cases.run_cases` writes. What the children print goes to files in
    ``folder``. ``report`` is told every record when it is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limits.total
    records: dict[str, Record] = {}

    def add(record: Record) -> None:
        records[record["name"]] = record
        report(record)

    attempt = 0
    while left := [name for name in names if name not in records]:
        if end - time.monotonic() < START_SECONDS:
            for name in left:
                add(_record(name, "skipped", "no time was left"))
            break
        attempt += 1
        child = _Child(command, left, folder / f"child-{attempt}", add)
        why = child.watch(end, limits.stall)
        if child.started is not None:
            status = "skipped" if why == "no time was left" else "error"
            add(_record(child.started, status, why, child.last_words()))
        elif not child.ended and why:
            for name in left:  # it can't even start; another would do no better
                add(_record(name, "error", why, child.last_words()))
    return [records[name] for name in names]


def _record(name: str, status: str, reason: str, words: str = "") -> Record:
    record: Record = {"name": name, "seconds": 0.0, "status": status, "reason": reason}
    return record | ({"traceback": words} if words and status == "error" else {})


class _Child:
    """One process and what it has written so far."""

    def __init__(
        self,
        command: Sequence[str],
        names: Sequence[str],
        stem: Path,
        add: Callable[[Record], None],
    ) -> None:
        self.started: str | None = None  # the case it is at
        self.ended = 0
        self._add = add
        self._lines = stem.with_suffix(".jsonl")
        self._lines.touch()
        self._output = stem.with_suffix(".txt")
        wanted = stem.with_suffix(".names")
        wanted.write_text("\n".join(names), encoding="utf-8")
        files = ["--names", str(wanted), "--lines", str(self._lines)]
        with self._output.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [*command, *files], stdout=output, stderr=subprocess.STDOUT
            )
        self._read = 0

    def watch(self, end: float, stall: float) -> str:
        """Wait until it ends, or end it; returns why, or nothing if it has run all cases."""
        moved = time.monotonic()
        why = ""
        try:
            while self._process.poll() is None:
                now = time.monotonic()
                if self._take_lines():
                    moved = now
                if now > end:
                    why = "no time was left"
                elif now - moved > stall:
                    why = f"it did not end within {stall:g} s"
                if why:
                    break
                time.sleep(_POLL)
        finally:
            if self._process.poll() is None:
                self._process.kill()
            status = self._process.wait()
        self._take_lines()
        if not why and status:
            why = f"its process ended with status {status}"
            if status == BROKEN:
                why = "the device was unusable for this process"
        return why

    def last_words(self) -> str:
        """The end of what it printed."""
        return self._output.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _take_lines(self) -> bool:
        """Read the lines that are complete; whether there was any."""
        with self._lines.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        for line in data[:whole].splitlines():
            event = json.loads(line)
            if "start" in event:
                self.started = event["start"]
            else:
                self.started = None
                self.ended += 1
                self._add(event["end"])
        return whole > 0
