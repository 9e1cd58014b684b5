"""`python -m benchmarks`."""

import signal
import sys

from benchmarks.runner import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: end servers, keep rows
    sys.exit(main())
