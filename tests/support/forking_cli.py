"""``python -m support.forking_cli ...``: `vllm-medusa` whose children are forked from it.

They are fresh Python processes otherwise, each of which imports vLLM for some ten seconds. Here it
is imported once, by a process that never runs an engine; all else about them is as it was.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from typing import IO, Any


class Forked:
    """Stands in for the `subprocess.Popen` of a `children.Child`."""

    def __init__(
        self, command: list[str], *, stdout: IO[bytes], pass_fds: list[int], **_: Any
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.args, self.returncode = command, None
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, stdout.fileno(), pass_fds)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None: it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it runs on.

        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, 9)


def _become(command: list[str], log: int, kept: list[int]) -> None:
    """Be the process that the command asks for; never returns."""
    status: Any = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in os.listdir("/proc/self/fd"):  # else the ends of channels stay open here
            if int(name) > 2 and int(name) not in kept:
                try:
                    os.close(int(name))
                except OSError:
                    continue  # the folder's own
        from vllm_medusa.offline import children

        children._main(*command[3:])
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def main() -> None:
    """Run a command."""
    import matplotlib.pyplot  # noqa: F401
    import transformers  # noqa: F401
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    import vllm_medusa.adapt.pipeline  # noqa: F401
    from vllm_medusa import cli
    from vllm_medusa.offline import children

    children.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
