"""What drafts of some requests take beside the step itself: whoever chooses them by a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Surcharge:
    """Milliseconds, means over all requests and nodes of a batch."""

    copied: float = 0.0  # of a request, for drafts that no head is needed for
    drafted: float = 0.0  # of a request, for choosing among what heads drafted
    node: float = 0.0  # of a node that is verified

    def ms(self, rows: Any, requests: int, heads: Any) -> Any:
        """Of steps with ``rows`` and a share of ``heads``, one or [n]; see `StepCost.ms`."""
        nodes = rows - requests
        once = np.where(np.greater(heads, 0), self.drafted, self.copied * np.greater(nodes, 0))
        return once * requests + self.node * nodes
