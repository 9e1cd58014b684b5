"""Keep what an engine writes to standard error while it starts off the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

_SHOWN_LINES = 25
_SHOWN_BYTES = 1 << 14


@contextlib.contextmanager
def stderr_to_log(enabled: bool = True) -> Iterator[None]:
    """Send standard error, that of child processes included, to a temporary file.

    vLLM, torch and the tokenizers warn while they start, partly from C++ and from child processes,
    where no log level reaches. If the block raises, the end of the file is shown; errors about the
    user's input (`ValueError`, `OSError`) explain themselves.
    """
    if not enabled:
        yield
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    explained = False
    with tempfile.TemporaryFile(prefix="vllm-medusa-") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
            explained = True
        except (ValueError, OSError):
            explained = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            if not explained and (end := end_of(log.fileno())):
                sys.stderr.write(f"--- the end of its log:\n{end}\n---\n")


def end_of(log: int) -> str:
    """The last lines of an open file."""
    size = os.fstat(log).st_size
    end = os.pread(log, _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
    return "\n".join(end.decode(errors="replace").splitlines()[-_SHOWN_LINES:])
