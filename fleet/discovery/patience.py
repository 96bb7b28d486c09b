"""How long to wait after a failure: longer each time, never twice the same."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds that double from `first_s` to `most_s`, each drawn from its upper half.

    Drawn, because all gateways lose the API server in the same moment and must not come back in
    the same moment.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._failures = 0

    def next_s(self) -> float:
        """Return the delay after one more failure."""
        longest_s = min(self._most_s, self._first_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, 32)
        return longest_s * random.uniform(0.5, 1.0)
