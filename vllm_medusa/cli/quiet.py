"""Keep what an engine writes to standard error while it starts off the terminal, but in reach."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHOWN_LINES = 25


@contextlib.contextmanager
def stderr_to_log(enabled: bool = True) -> Iterator[Path | None]:
    """Send standard error, that of processes started inside included, to a new file.

    vLLM, torch and the tokenizers warn while they start, partly from C++ and from child processes,
    where no log level reaches. The children go on writing to the file when the block has ended. If
    the block raises, the end of the file is shown, since it usually has the reason; errors about
    the user's input (`ValueError`, `OSError`) say it themselves. The file goes when this process
    ends.

    Args:
        enabled: False changes nothing.

    Yields:
        The file, or None.

    """
    if not enabled:
        yield None
        return
    handle, name = tempfile.mkstemp(prefix="vllm-medusa-", suffix=".log")
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(handle, 2)
    os.close(handle)
    atexit.register(Path(name).unlink, missing_ok=True)
    explained = False
    try:
        yield Path(name)
        explained = True
    except (ValueError, OSError):
        explained = True
        raise
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        if not explained:
            show_end(Path(name))


def show_end(log: Path) -> None:
    """Print the last lines of a log to standard error."""
    lines = log.read_text(errors="replace").splitlines()
    if lines:
        print(f"--- the end of {log}:", *lines[-_SHOWN_LINES:], "---", sep="\n", file=sys.stderr)
