"""Moments as a reader wants them: how long ago where `now` is known, else in UTC. Pure.

For prose only: messages, hints, log lines. Fields of answers stay seconds since the epoch.
"""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago(then: float, now: float) -> str:
    """Return how long before `now` that was: "4.2 s ago", "3 min 20 s ago", "2 d 4 h ago".

    What another machine's clock puts after `now` was just now.
    """
    elapsed_s = max(0.0, now - then)
    if elapsed_s < 59.95:
        return f"{elapsed_s:.1f} s ago"
    seconds = round(elapsed_s)
    first = next(i for i, (size, _) in enumerate(_UNITS) if seconds >= size)
    (large, unit), (small, rest) = _UNITS[first : first + 2]
    return f"{seconds // large} {unit} {seconds % large // small} {rest} ago"


def utc(at: float) -> str:
    """Return a moment as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
