"""Keep what an engine writes to standard error while it starts off the terminal, but in reach."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

_SHOWN_LINES = 25
Read = Callable[[], str]  # all that was written so far


@contextlib.contextmanager
def stderr_to_log(enabled: bool = True) -> Iterator[Read | None]:
    """Send standard error, that of processes started inside included, to a file without a name.

    vLLM, torch and the tokenizers warn while they start, partly from C++ and from child processes,
    where no log level reaches. The children go on writing to the file when the block has ended; it
    is gone with the last of them, however they end. If the block raises, the end of the file is
    shown, since it usually has the reason; errors about the user's input (`ValueError`, `OSError`)
    say it themselves.

    Args:
        enabled: False changes nothing.

    Yields:
        What reads the file, or None.

    """
    if not enabled:
        yield None
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    explained = False
    with tempfile.TemporaryFile(prefix="vllm-medusa-") as log:
        os.dup2(log.fileno(), 2)

        def read() -> str:
            return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(
                errors="replace"
            )

        try:
            yield read
            explained = True
        except (ValueError, OSError):
            explained = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            if not explained:
                _show_end(read())


def _show_end(log: str) -> None:
    """Print the last lines of a log to standard error."""
    lines = log.splitlines()
    if lines:
        shown = ["--- the end of its log:", *lines[-_SHOWN_LINES:], "---"]
        sys.stderr.write("\n".join(shown) + "\n")
