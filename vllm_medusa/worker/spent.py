"""What a scheduler learns of grammars along drafts: their time, and how a model follows them."""

from __future__ import annotations

from vllm_medusa.budget.surcharge import Surcharge

_NEWS = 0.1  # weight of the latest in what is known
_FIRST, _TRUST = 0.85, 8.0  # what is expected at first, and how many tokens it counts for
_KEPT = 1.0 - 1.0 / 512.0  # of what was seen, from token to token


class Spent:
    """Follows what is measured."""

    def __init__(self, *, masks_count: bool) -> None:
        """Begin with nothing.

        Args:
            masks_count: masks aren't made beside the forward pass, so steps wait for them.

        """
        self.seconds = 0.0  # in this step, as far as it waited
        self._masks_count = masks_count
        self._forcing_now, self._forced = 0.0, 0  # seconds and requests of this step
        self._choosing = self._forcing = self._mask = 0.0  # seconds, of a request or node

    def begin(self) -> None:
        """Begin a step."""
        if self._forced:
            self._forcing = followed(self._forcing, self._forcing_now / self._forced)
        self.seconds, self._forcing_now, self._forced = 0.0, 0.0, 0

    def on_choosing(self, requests: int, seconds: float) -> None:
        """Take the time in which grammars chose among what heads drafted."""
        self._choosing = followed(self._choosing, seconds / requests)
        self.seconds += seconds

    def on_forcing(self, requests: int, seconds: float) -> None:
        """Take the time for drafts without heads, learning included, of all that may have some.

        Args:
            requests: these; 0: a few were only looked at.
            seconds: the time.

        """
        self._forced = max(self._forced, requests)
        self._forcing_now += seconds
        self.seconds += seconds

    def on_masks(self, nodes: int, seconds: float) -> None:
        """Take the time of nodes' masks."""
        if self._masks_count:
            self._mask = followed(self._mask, seconds / max(nodes, 1))
            self.seconds += seconds

    def surcharge(self, share: float) -> Surcharge:
        """What to expect of a batch, by the share of its requests that follow a grammar."""
        of_all = 1e3 * share
        return Surcharge(of_all * self._forcing, of_all * self._choosing, of_all * self._mask)


class Chance:
    """How often it is the longest of the few tokens that a grammar allows; it forgets."""

    def __init__(self) -> None:
        self._hits, self._seen = _FIRST * _TRUST, _TRUST

    def observe(self, hit: bool) -> None:
        """Take one more."""
        self._hits = _KEPT * self._hits + hit
        self._seen = _KEPT * self._seen + 1.0

    @property
    def value(self) -> float:
        """What to expect."""
        return self._hits / self._seen


def followed(known: float, value: float) -> float:
    """A mean that follows its values; 0: nothing is known."""
    return known + _NEWS * (value - known) if known else value
