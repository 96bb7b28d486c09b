"""An outage of the store, as one gateway sees it: told when it begins and when it is over.

What fails does so every second, so it is not told each time; what goes on is told now and then.
"""

from __future__ import annotations

import logging
from time import monotonic, time

log = logging.getLogger(__name__)

REMIND_S = 60.0


class Outage:
    """Begins with the first failure of `what`, ends with its next success."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told_at = 0.0
        self.since: float | None = None
        """When it began, in seconds since the epoch; None while all is well."""
        self.why = ""

    def failed(self, why: str) -> None:
        """Note one failure."""
        self.why = why
        if self.since is None:
            self.since = time()
        elif monotonic() < self._told_at + REMIND_S:
            return
        self._told_at = monotonic()
        log.warning("store fails", extra={"what": self._what, "error": why})

    def over(self) -> None:
        """Note one success."""
        if self.since is not None:
            lasted_s = round(time() - self.since, 1)
            log.warning("store is back", extra={"what": self._what, "after_s": lasted_s})
            self.since = None
